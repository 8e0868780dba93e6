"""The executions in a replica's list, which gateways send while a task is on its way to the replica or serves it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import redis
import structlog

from inference_worker.contract.messages import Wakeup, decode_wakeup, wakeups_key
from inference_worker.worker.thread_commands import ThreadCommands

log = structlog.get_logger(__name__)

NEXT_WAKEUP_SECONDS = 0.05  # how long a task waits for a further execution


def decode_wakeups(entries: Iterable[bytes]) -> list[Wakeup]:
    """Decode entries of a replica's list, without those that are invalid."""
    wakeups = []
    for entry in entries:
        try:
            wakeups.append(decode_wakeup(entry))
        except msgspec.MsgspecError as exc:
            log.warning("invalid_wakeup", error=str(exc))
    return wakeups


def wait_for_wakeup(commands: ThreadCommands, replica_id: str) -> list[Wakeup]:
    """Wait for an execution in the replica's list. Return it, or nothing if none is sent in time.

    An execution in a lost response is lost, and its gateway sends it again.
    """
    try:
        (reply,) = commands.exchange([("BLPOP", wakeups_key(replica_id), NEXT_WAKEUP_SECONDS)])
        if isinstance(reply, redis.RedisError):
            raise reply
    except redis.RedisError as exc:
        log.warning("wakeups_unreadable", error=str(exc))
        return []
    return [] if reply is None else decode_wakeups(reply[1:])
