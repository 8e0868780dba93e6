"""Unsettled usage of workers, as their heartbeats report it. The report of a lost worker remains.

The hash `millrace:unsettled_usage` has an `UnsettledUsage` by the ID of a journal, while the journal has usage that is
not known to be settled. So a worker that has the name of a lost one and another journal does not replace its report.
The usage itself is only in the journal, and usually also in the usage stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from inference_worker.contract.messages import ExecutionUsage

UNSETTLED_KEY = "millrace:unsettled_usage"


class UnsettledEntry(msgspec.Struct, frozen=True, array_like=True):
    """An execution whose usage is not known to be settled."""

    admitted_at: int  # microseconds since 1970, UTC
    request_id: str
    execution: int
    tenant_id: int
    payload_hash: bytes  # SHA-256 of its message, by which quarantine finds it


class UnsettledUsage(msgspec.Struct, frozen=True):
    """The usage in one journal that is not known to be settled."""

    worker: str  # name of the worker
    host: str  # name of the machine with the journal
    process_id: str
    executions: int
    oldest: UnsettledEntry
    newest: UnsettledEntry


def describe_unsettled(
    events: Sequence[ExecutionUsage], worker: str, host: str, process_id: str
) -> UnsettledUsage | None:
    """Return the report about a journal's unsettled events, which are given oldest first; None without any."""
    if not events:
        return None
    oldest, newest = _describe_entry(events[0]), _describe_entry(events[-1])
    return UnsettledUsage(worker, host, process_id, len(events), oldest, newest)


def _describe_entry(event: ExecutionUsage) -> UnsettledEntry:
    context = event.billing_context
    payload_hash = hashlib.sha256(event.encoded).digest()
    return UnsettledEntry(context.admitted_at, context.request_id, context.execution, context.tenant_id, payload_hash)


decode_unsettled = msgspec.msgpack.Decoder(UnsettledUsage).decode
