"""The states of an execution, and the changes between them.

The dispatcher, its monitor and the answer cache change the state as they receive claims, events and losses, which may
be late. So a change that `TRANSITIONS` does not contain is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class ExecutionState(Enum):
    """The state of an execution in the gateway that has dispatched it."""

    NEW = auto()  # admitted, and in no queue
    QUEUED = auto()  # waits for a replica with capacity
    SENT = auto()  # a replica was selected, and no replica has claimed it
    RESENT = auto()  # the replica's wakeup was sent again
    CLAIMED = auto()  # a replica has claimed it
    STREAMING = auto()  # an event of the current attempt was accepted, so no other attempt may start
    FINISHED = auto()  # no replica sends further events: it was cancelled, has failed, or is served by the answer cache
    ENDED = auto()  # its last event was received
    OVERDUE = auto()  # it has failed after its deadline
    CLOSED = auto()  # what it reserved is released


_ENDS = frozenset({ExecutionState.FINISHED, ExecutionState.ENDED, ExecutionState.OVERDUE})
_RUNNING = frozenset({ExecutionState.QUEUED, ExecutionState.CLAIMED, ExecutionState.STREAMING}) | _ENDS
# State -> the states that may follow. An execution is queued again if its replica was lost or has released it. A
# replica may claim a queued one by an earlier wakeup, and the event of the claim may be lost.
TRANSITIONS: Mapping[ExecutionState, frozenset[ExecutionState]] = {
    ExecutionState.NEW: frozenset({ExecutionState.QUEUED}) | _ENDS,
    ExecutionState.QUEUED: (_RUNNING - {ExecutionState.QUEUED}) | {ExecutionState.SENT},
    ExecutionState.SENT: _RUNNING | {ExecutionState.RESENT},
    ExecutionState.RESENT: _RUNNING | {ExecutionState.RESENT},
    ExecutionState.CLAIMED: _RUNNING,
    ExecutionState.STREAMING: _ENDS,
    ExecutionState.FINISHED: frozenset({ExecutionState.ENDED, ExecutionState.OVERDUE, ExecutionState.CLOSED}),
    ExecutionState.ENDED: frozenset({ExecutionState.OVERDUE, ExecutionState.CLOSED}),
    ExecutionState.OVERDUE: frozenset({ExecutionState.CLOSED}),
    ExecutionState.CLOSED: frozenset(),
}
FINISHED_STATES = _ENDS | {ExecutionState.CLOSED}
UNCLAIMED_STATES = frozenset({ExecutionState.SENT, ExecutionState.RESENT})
BEGUN_STATES = frozenset({ExecutionState.STREAMING, ExecutionState.ENDED})
