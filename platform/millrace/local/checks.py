"""Checks before the platform starts. Each error message says what to do."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import shutil
import socket
import stat
from pathlib import Path
from typing import TextIO

from inference_worker.checkpoints.downloads.hub_source import HubSource
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.contract.disk import RESUME_PERCENT
from inference_worker.contract.settings import EMBEDDED, HUB_PREFIX, ModelSpec
from millrace.local import INSTALL_SERVER, embedded_models

_PACKAGES = ("celery", "channels", "django", "gguf", "psycopg", "redis", "tokenizers", "torch", "uvicorn")
_FREE_BYTES = 2**30


class CheckFailed(Exception):
    """Raised if a requirement is not met. The message says what to do."""


def packages() -> None:
    """Check that the packages that the platform imports are installed."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise CheckFailed(f"not installed: {', '.join(missing)}; {INSTALL_SERVER}")


def data_directory(directory: Path, min_free: int) -> None:
    """Create the data directory, and check that it is writable and has space.

    A new directory needs space for models and data. An existing one needs enough for the gateway to accept requests.
    """
    try:
        if not directory.exists():
            directory.mkdir(parents=True)
            # If this process runs as root, PostgreSQL runs as another user, who must be able to traverse the directory.
            directory.chmod(0o711 if os.geteuid() == 0 else 0o700)
        (directory / "logs").mkdir(mode=0o700, exist_ok=True)
        for path in (directory, directory / "logs"):
            probe = path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        os.listdir(directory)
    except OSError as exc:
        raise CheckFailed(
            f"the data directory {directory} cannot be used ({exc.strerror}: {exc.filename});"
            " fix its owner or mode, or choose another directory with --data-dir or MILLRACE_DATA_DIR"
        ) from None
    free = shutil.disk_usage(directory).free
    needed = min_free * RESUME_PERCENT // 100 if (directory / "env").exists() else _FREE_BYTES
    if free < needed:
        raise CheckFailed(
            f"{directory}: {free // 2**20} MiB are free, at least {needed // 2**20} MiB are needed; free space, or"
            " choose another directory with --data-dir or MILLRACE_DATA_DIR"
        )


def lock_data_dir(directory: Path) -> TextIO:
    """Lock the data directory until the returned file is closed or this process ends."""
    path = directory / "lock"
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as exc:
        raise CheckFailed(f"{path}: {exc.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise CheckFailed(
            f"another platform (process {holder}) runs on {directory};"
            " stop it, or choose another directory with --data-dir or MILLRACE_DATA_DIR"
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def port_free(host: str, port: int) -> None:
    """Check that the gateway can listen on this address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            problem = f"port {port} on {host} is in use; stop the process that uses it, or choose another port"
        elif exc.errno == errno.EACCES:
            problem = f"port {port} on {host} is not allowed for this user; choose one above 1023"
        else:
            problem = f"cannot listen on {host} port {port} ({exc}); check MILLRACE_HOST, or choose another port"
    other = port + 1 if 1024 <= port < 65_535 else 8000
    raise CheckFailed(f"{problem}: make up PORT={other}, --port or MILLRACE_PORT")


def models_available(models: tuple[ModelSpec, ...]) -> None:
    """Check that each model's source can be read. Of a model on the hub, only its id is checked."""
    for spec in models:
        if spec.source in EMBEDDED:
            continue
        if spec.source.startswith(HUB_PREFIX):
            try:
                HubSource.parse(spec.source.removeprefix(HUB_PREFIX))
            except ModelError as exc:
                raise CheckFailed(f"MILLRACE_MODELS: {spec.name}: {exc}") from None
            continue
        path = Path(spec.source).expanduser()
        try:
            status = path.stat()
        except OSError as exc:
            raise CheckFailed(f"MILLRACE_MODELS: {spec.name}: {path}: {exc.strerror}") from None
        if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(status.st_mode) else 0)):
            raise CheckFailed(f"MILLRACE_MODELS: {spec.name}: {path}: no permission to read it")


def embedded_packages(models: tuple[ModelSpec, ...]) -> None:
    """Check that the packages of the embedded models are installed, or that they can be."""
    missing = embedded_models.missing_packages(models)
    if missing and (problem := embedded_models.missing_installer()):
        raise CheckFailed(f"not installed: {', '.join(missing)}; {problem}")


def database_answers(url: str) -> None:
    """Check that the configured PostgreSQL accepts connections."""
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.Error as exc:
        raise CheckFailed(f"MILLRACE_DATABASE_URL: cannot connect: {str(exc).strip()}") from None


def broker_answers(url: str) -> None:
    """Check that the configured Valkey or Redis responds."""
    import redis

    from inference_worker.contract import valkey

    client = valkey.connect(url, valkey.STARTUP_CHECK)
    try:
        client.ping()
    except (redis.RedisError, ValueError) as exc:
        raise CheckFailed(f"MILLRACE_VALKEY_URL: cannot connect: {exc}") from None
    finally:
        client.close()
