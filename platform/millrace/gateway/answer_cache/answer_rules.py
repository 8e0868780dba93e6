"""The rule for answers that may be kept, of the exact and of the semantic cache."""

from __future__ import annotations

from collections.abc import Sequence

from inference_worker.contract.messages import AnswerEvent, End, Finished, Tokens

# A cancelled answer is incomplete. A filtered one depends on a provider's filter, which may decide otherwise next time.
KEPT_REASONS = frozenset(("stop", "length"))


def is_keepable(events: Sequence[AnswerEvent], choices: int, *, may_be_truncated: bool = True) -> bool:
    """Return whether the events are a complete answer, and each choice has a text or a tool call.

    Args:
        choices: number of output sequences.
        may_be_truncated: whether a choice may end at the output limit.
    """
    end = events[-1] if events else None
    if not isinstance(end, End):
        return False
    reasons = {event.finish_reason for event in events if isinstance(event, Finished | End)}
    if not reasons <= KEPT_REASONS or (not may_be_truncated and "length" in reasons):
        return False
    filled = {event.index for event in events if isinstance(event, Tokens) and (event.calls or event.text.strip())}
    return len(filled) == choices
