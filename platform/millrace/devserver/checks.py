"""What must hold before anything is started: each fault has a message that says what to do."""

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

from inference_worker.contract.disk import RESUME_PERCENT
from inference_worker.contract.settings import EMBEDDED, ModelSpec

_PACKAGES = ("celery", "channels", "django", "gguf", "psycopg", "redis", "tokenizers", "torch", "uvicorn")
_FREE_BYTES = 2**30


class CheckFailed(Exception):
    """Something is missing or in the way; the message says what to do."""


def packages() -> None:
    """See that what the platform imports is installed (pip has seen to the version of Python)."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise CheckFailed(f"not installed: {', '.join(missing)}; run `make setup`")


def state_folder(folder: Path, min_free: int) -> None:
    """Create the state directory, and check that it can be used and has space.

    A new one needs space for models and data. One that was used before needs what lets the gateway take requests.
    """
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            # Root's PostgreSQL runs as another user, who must be able to pass through.
            folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
        (folder / "logs").mkdir(mode=0o700, exist_ok=True)
        for path in (folder, folder / "logs"):
            probe = path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        os.listdir(folder)
    except OSError as exc:
        raise CheckFailed(
            f"the state folder {folder} cannot be used ({exc.strerror}: {exc.filename});"
            " fix its owner or mode, or choose another directory with --state or MILLRACE_STATE_DIR"
        ) from None
    free = shutil.disk_usage(folder).free
    needed = min_free * RESUME_PERCENT // 100 if (folder / "env").exists() else _FREE_BYTES
    if free < needed:
        raise CheckFailed(
            f"{folder}: {free // 2**20} MiB are free; at least {needed // 2**20} MiB are needed: free some, or name"
            " another directory with --state or MILLRACE_STATE_DIR"
        )


def only_one(folder: Path) -> TextIO:
    """Take the state folder's lock; it is held until the returned file is closed or this process ends."""
    path = folder / "lock"
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
            f"another `millrace up` (process {holder}) runs on {folder};"
            " stop it, or name another folder with --state or MILLRACE_STATE_DIR"
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def port_free(host: str, port: int) -> None:
    """See that the gateway will be able to listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            problem = f"port {port} on {host} is in use; stop what uses it, or take another"
        elif exc.errno == errno.EACCES:
            problem = f"port {port} on {host} is not allowed to this user; take one above 1023"
        else:
            problem = f"cannot listen on {host} port {port} ({exc}); check MILLRACE_HOST, or take another"
    other = port + 1 if 1024 <= port < 65_535 else 8000
    raise CheckFailed(f"{problem}: make up PORT={other}, --port or MILLRACE_PORT")


def models_there(models: tuple[ModelSpec, ...]) -> None:
    """See that each model's source can be read."""
    for spec in models:
        if spec.source in EMBEDDED:
            continue
        path = Path(spec.source).expanduser()
        try:
            found = path.stat()
        except OSError as exc:
            raise CheckFailed(f"MILLRACE_MODELS: {spec.name}: {path}: {exc.strerror}") from None
        if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(found.st_mode) else 0)):
            raise CheckFailed(f"MILLRACE_MODELS: {spec.name}: {path}: this user may not read it")


def database_answers(url: str) -> None:
    """See that the PostgreSQL the user named takes connections."""
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.Error as exc:
        raise CheckFailed(f"MILLRACE_DATABASE_URL: no connection: {str(exc).strip()}") from None


def broker_answers(url: str) -> None:
    """See that the Valkey or Redis the user named answers."""
    import redis

    from millrace.devserver.valkey import ONCE

    client = redis.Redis.from_url(url, socket_connect_timeout=5, socket_timeout=5, retry=ONCE)
    try:
        client.ping()
    except (redis.RedisError, ValueError) as exc:
        raise CheckFailed(f"MILLRACE_BROKER_URL: no connection: {exc}") from None
    finally:
        client.close()
