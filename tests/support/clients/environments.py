"""The environments of the client programs in tests/clients, each installed from its lock into build/clients."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CLIENTS = ROOT / "tests" / "clients"
INSTALLED = ROOT / "build" / "clients"
INSTALL_SECONDS = 900
# Their locks leave out torch, whose wheels from PyPI take 5 GB. They use the platform's, as the last entry of sys.path.
WITH_TORCH = ("python-guidellm", "python-open-webui")
_PIP = ("--disable-pip-version-check", "--no-input", "--quiet", "install", "--no-compile")


def python_environment(name: str) -> Path:
    """Return the interpreter of the virtual environment with the packages of locks/NAME.txt."""
    lock = CLIENTS / "locks" / f"{name}.txt"
    interpreter = INSTALLED / name / "bin" / "python"

    def install(directory: Path) -> None:
        _run(sys.executable, "-m", "venv", "--without-pip", str(directory))
        target = ("--python", str(interpreter))
        _run(sys.executable, "-m", "pip", *target, *_PIP, "--no-deps", "--require-hashes", "--requirement", str(lock))
        if name in WITH_TORCH:
            packages = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
            (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))

    _install(name, lock.read_bytes(), install)
    return interpreter


def node_runtime() -> Path:
    """Return the directory of `node` and `npm`, which come from PyPI."""
    return python_environment("node-runtime").parent


def node_environment(name: str) -> Path:
    """Return the directory with the packages of locks/NAME/package-lock.json, and the programs of tests/clients/node.

    The programs are copied there, because Node looks for packages above the importing file.
    """
    lock, runtime = CLIENTS / "locks" / name, node_runtime()

    def install(directory: Path) -> None:
        directory.mkdir(parents=True)
        for file in ("package.json", "package-lock.json"):
            shutil.copy(lock / file, directory)
        _run(str(runtime / "npm"), "ci", "--no-audit", "--no-fund", "--loglevel=error", cwd=directory, path=runtime)

    _install(name, (lock / "package-lock.json").read_bytes(), install)
    shutil.copytree(CLIENTS / "node", INSTALLED / name / "programs", dirs_exist_ok=True)
    return INSTALLED / name


def _install(name: str, lock: bytes, install: Callable[[Path], None]) -> None:
    """Install into INSTALLED/NAME, unless this lock is installed there. Another process may do the same."""
    INSTALLED.mkdir(parents=True, exist_ok=True)
    directory, stamp = INSTALLED / name, INSTALLED / name / ".lock-digest"
    digest = hashlib.sha256(lock).hexdigest()
    with (INSTALLED / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == digest:
            return
        shutil.rmtree(directory, ignore_errors=True)
        install(directory)
        stamp.write_text(digest)


def _run(*command: str, cwd: Path | None = None, path: Path | None = None) -> None:
    environ = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None
    try:
        result = subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as exc:
        advice = "check that PyPI and the npm registry can be reached"
        raise AssertionError(f"{' '.join(command)}: not finished after {INSTALL_SECONDS} s; {advice}") from exc
    assert result.returncode == 0, f"{' '.join(command)}:\n{result.stdout[-4000:]}{result.stderr[-4000:]}"
