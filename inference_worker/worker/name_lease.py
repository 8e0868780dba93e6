"""The lease of a worker's name in Valkey: a name identifies slots and cordons, so one process at a time has it.

The holder renews it twice a second. A starting process takes it:

- if no process holds it. After the loss of a host, it expires within LEASE_SECONDS.
- from a process that leaves, which is a planned successor: the old one still finishes its streams.
- from a process with the same journal. The starting process has that journal's lock, so the holder has ended.

Otherwise it waits until the lease expires, or the holder renews it. In the latter case the starting process ends with
an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import redis
import structlog

from inference_worker.contract.host import host_name
from inference_worker.contract.messages import HEARTBEAT_SECONDS, REPLICA_LOST_SECONDS
from inference_worker.contract.script_files import read_script
from inference_worker.worker.periodic_thread import PeriodicThread

log = structlog.get_logger(__name__)

LEASE_SECONDS = REPLICA_LOST_SECONDS  # gateways then treat the replicas of a silent process as lost
_LUA = Path(__file__).parent / "lua"
HOLD_NAME = read_script(_LUA / "hold_name.lua")
LEAVE_NAME = read_script(_LUA / "leave_name.lua")


class NameHolder(NamedTuple):
    """The process that holds a name."""

    process: str
    host: str
    renewals: int


def lease_key(name: str) -> str:
    """Return the key in Valkey of the lease of a worker's name."""
    return f"millrace:worker_name:{name}"


class NameLease:
    """The lease of this process, and the thread that renews it."""

    def __init__(self, broker: redis.Redis, name: str, process_id: str) -> None:
        self._broker = broker
        self._name = name
        self._process_id = process_id
        self._journal_id = ""
        self._is_leaving = False
        self._on_lost: Callable[[], None] = lambda: None
        self._hold_script = broker.register_script(HOLD_NAME)
        self._leave_script = broker.register_script(LEAVE_NAME)
        self._thread = PeriodicThread("name-lease", self._renew, HEARTBEAT_SECONDS, waits_first=True)

    def take(self, journal_id: str, on_lost: Callable[[], None]) -> None:
        """Take the lease, and renew it from now on. If Valkey cannot be reached, it is taken later.

        Args:
            journal_id: identifies the journal whose lock this process has.
            on_lost: is called once if another process has taken the name.

        Raises:
            SystemExit: another running process has the name.
        """
        self._journal_id, self._on_lost = journal_id, on_lost
        try:
            self._wait_for_lease()
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
        self._thread.start()

    def find_host(self) -> str:
        """Return the host of the process that holds the name; this host if none is known."""
        try:
            host: Any = self._broker.hget(lease_key(self._name), "host")
        except redis.RedisError:
            host = None
        return host.decode() if host else host_name()

    def leave(self) -> None:
        """Let a successor take the name while this process finishes its streams."""
        self._is_leaving = True
        self._leave(is_end=False)

    def release(self) -> None:
        """Stop renewing, and end the lease."""
        self._thread.close()
        self._leave(is_end=True)

    def _leave(self, *, is_end: bool) -> None:
        try:
            self._leave_script(keys=[lease_key(self._name)], args=[self._process_id, int(is_end)])
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))

    def _wait_for_lease(self) -> None:
        first = holder = self._hold(is_start=True)
        give_up_at = time.monotonic() + LEASE_SECONDS + 2 * HEARTBEAT_SECONDS
        while holder is not None:
            if first != holder or time.monotonic() >= give_up_at:
                raise SystemExit(describe_conflict(self._name, f"{holder.host}, {holder.process}"))
            time.sleep(HEARTBEAT_SECONDS / 2)
            holder = self._hold(is_start=True)

    def _hold(self, *, is_start: bool) -> NameHolder | None:
        """Take or renew the lease. Return the holder if it is another process."""
        milliseconds = round(LEASE_SECONDS * 1000)
        reply: Any = self._hold_script(
            keys=[lease_key(self._name)],
            args=[self._process_id, host_name(), self._journal_id, milliseconds, int(is_start)],
        )
        return NameHolder(reply[0].decode(), reply[1].decode(), int(reply[2])) if reply else None

    def _renew(self) -> None:
        holder = self._hold(is_start=False)
        if holder is None:
            return
        self._thread.stop()
        if not self._is_leaving:
            log.error("worker_name_lost", name=self._name, host=holder.host, process=holder.process)
            self._on_lost()


def describe_conflict(name: str, holder: str) -> str:
    """Return the error of a worker whose name another process has."""
    return (
        f"MILLRACE_WORKER_NAME: the name {name} belongs to a running worker on host {holder}; set a name that no other"
        " worker has, or stop that worker"
    )
