"""Reports of exited workers in the broker, so that gateways need not wait for overdue heartbeats.

A worker stores its replica's id in the directory of its journal, which one process at a time can lock. So a stored id
belongs to an exited process in either of these cases:

- A supervisor has seen the process exit, and no other process has the lock. The supervisor calls `report_last_exit`
  before it starts the next process.
- Another process has the lock. It calls `take_over` when it starts.

Reported ids stay in the sorted set `exits`, because a delayed heartbeat can add the replica to `replicas` again. The
scores are seconds of the broker's clock.

A process can have several replicas. The reported id is the process's id, which is the start of its replicas' ids.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import redis
import structlog

from inference_worker.contract import valkey
from inference_worker.contract.journal import is_free
from inference_worker.contract.messages import EXITS_KEY, REPLICAS_KEY, beat_key
from inference_worker.contract.script_files import read_script

log = structlog.get_logger(__name__)

EXIT_TTL_SECONDS = 3600
LOCK_SECONDS = 0.5  # until forked children, which inherited the lock, have ended too
_FILE = "replica"

REPORT_EXIT = read_script(Path(__file__).parent / "lua" / "report_exit.lua")


def take_over(broker: redis.Redis, directory: Path, replica_id: str) -> None:
    """Report the exit of the previous process's replica, and store the new replica's id. The caller has the journal's
    lock.

    If the broker is unreachable, nothing is reported. Gateways then wait for the previous replica's overdue heartbeat.
    """
    earlier = _stored_replica(directory)
    if earlier not in (None, replica_id):
        try:
            report_exit(broker, earlier)
        except redis.RedisError as exc:
            log.warning("exit_report_failed", replica_id=earlier, error=str(exc))
    _store_replica(directory, replica_id)


def report_last_exit(broker_url: str, directory: Path) -> None:
    """Report the exit of the process that last had the journal in `directory`. Never raises, and returns within
    seconds.

    Nothing is reported while a process has the journal's lock. The stored id is then that of a running worker, and the
    process that exited did not get the lock.
    """
    replica_id = _stored_replica(directory)
    if replica_id is None or not is_free(directory, wait_seconds=LOCK_SECONDS):
        return
    try:
        with valkey.connect(broker_url, valkey.SUPERVISOR) as broker:
            report_exit(broker, replica_id)
    except (redis.RedisError, OSError) as exc:
        log.warning("exit_report_failed", replica_id=replica_id, error=str(exc))


def report_stored_exit(broker: redis.Redis, directory: Path) -> None:
    """Report the exit of the process that last had the journal in `directory`. The caller has the journal's lock.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    replica_id = _stored_replica(directory)
    if replica_id is not None:
        report_exit(broker, replica_id)


def report_exit(broker: redis.Redis, replica_id: str) -> None:
    """Mark a replica as exited for every gateway. The mark is permanent, since a restarted worker has another replica
    id."""
    broker.eval(REPORT_EXIT, *report_exit_args(replica_id))


def report_exit_args(replica_id: str) -> tuple[int, str, str, str, str, str]:
    """Return the number of keys, the keys and the arguments of `REPORT_EXIT`."""
    return 3, EXITS_KEY, REPLICAS_KEY, beat_key(replica_id), replica_id, str(EXIT_TTL_SECONDS)


def _stored_replica(directory: Path) -> str | None:
    try:
        return (directory / _FILE).read_text(encoding="utf-8") or None
    except (OSError, ValueError):
        return None


def _store_replica(directory: Path, replica_id: str) -> None:
    """Replace the stored id. If the disk is full, store none rather than a wrong one."""
    path = directory / _FILE
    try:
        path.with_suffix(".new").write_text(replica_id, encoding="utf-8")
        path.with_suffix(".new").replace(path)
    except OSError as exc:
        log.warning("replica_store_failed", error=str(exc))
        with contextlib.suppress(OSError):
            path.unlink()
