"""What a request's record contains about its success: its end user, failures of its answer, and its experiment."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tenants.routing_policies.experiments import CONVERSATION, ArmAssignment

if TYPE_CHECKING:
    from millrace.gateway.dispatch.execution import Execution
    from millrace.gateway.lifecycle.active_request import ActiveRequest

_TAIL_TOKENS, _TAIL_BYTES = 256, 4096  # end of a prompt, which identifies it together with its length
SCHEMA, TOOL = "schema", "tool"  # failures of an answer


class SuccessSignals(NamedTuple):
    """The last columns of a request's record."""

    end_user: str = ""
    failure: str = ""  # failure of a completed answer: SCHEMA or TOOL
    retry_key: int | None = None  # equal if the same end user sends the same prompt again
    itl_us: int | None = None  # mean time between tokens, in microseconds
    experiment_id: int | None = None
    experiment_arm: int | None = None
    experiment_unit: str = ""


def success_signals(parts: Sequence[ActiveRequest], failure: str) -> SuccessSignals:
    """Return the signals of a request with these prompts.

    Args:
        parts: none if the request was rejected before it was routed.
        failure: of the answer, if an endpoint has found one.
    """
    if not parts:
        return SuccessSignals()
    first = parts[0]
    request, assignment = first.request, first.route.assignment or ArmAssignment(0, 0, "")
    execution = first.execution if first.executions else None
    if execution is not None and not failure:
        failure = _failure(first, execution)
    return SuccessSignals(
        request.end_user,
        failure,
        _retry_key(first),
        None if execution is None or request.sampling.n > 1 else _inter_token_us(execution),
        assignment.experiment_id or None,
        assignment.arm if assignment.experiment_id else None,
        assignment.unit,
    )


def _failure(active: ActiveRequest, execution: Execution) -> str:
    """Return the failure of a completed answer that can be seen without its text."""
    request = active.request
    if any(not _is_json(arguments) for arguments in execution.call_arguments.values()):
        return TOOL
    if execution.finish_reason == "length":
        if request.structured is not None:
            return SCHEMA
        if request.tools and request.tool_choice not in ("auto", "none"):
            return TOOL
    return ""


def _is_json(arguments: str) -> bool:
    try:
        msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _retry_key(active: ActiveRequest) -> int | None:
    """Return a hash of the end user and the prompt; None without an end user, whose retries are unknown."""
    request, prompt = active.request, active.prompt
    person = request.user or request.metadata.get(CONVERSATION)
    if not person:
        return None
    if prompt.upstream is not None:
        length, tail = len(prompt.upstream.body), prompt.upstream.body[-_TAIL_BYTES:]
    else:
        length, tail = len(prompt.ids), array("q", prompt.ids[-_TAIL_TOKENS:]).tobytes()
    start = f"{active.key.key_id}\0{person}\0{length}\0".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(start + tail, digest_size=8).digest(), "big", signed=True)


def _inter_token_us(execution: Execution) -> int | None:
    if execution.first_token_at is None or execution.completed_at is None or execution.output_tokens < 2:
        return None
    seconds = execution.completed_at - execution.first_token_at
    return min(round(seconds * 1e6 / (execution.output_tokens - 1)), 2**31 - 1)
