"""Checks of a complete answer, by which a routing policy escalates to its next target."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from inference_worker.contract.messages import AnswerEvent
from millrace.gateway.core.types import InferenceRequest, ResponseSpec
from millrace.gateway.protocols.answer_parts import split_answer
from tenants.routing_policies.answer_pattern import compile_pattern
from tenants.routing_policies.policy import Escalation

MAX_PATTERN_CHARACTERS = 2**18  # characters of an answer; a longer one is not matched


async def failed_check(
    escalation: Escalation, request: InferenceRequest, spec: ResponseSpec, events: Sequence[AnswerEvent]
) -> str | None:
    """Return the first check that an answer fails; None if it passes. Checks that cannot be decided pass."""
    choices = split_answer(spec, events, spec.n)
    for check in escalation.on:
        if check == "empty" and any(not (choice.text.strip() or choice.calls) for choice in choices):
            return check
        if check == "tool_arguments" and not all(
            _is_object(text) for choice in choices for text in choice.calls.values()
        ):
            return check
        texts = [choice.text for choice in choices if not choice.calls]
        if check == "schema" and await _is_invalid(request, texts):
            return check
        if check == "pattern" and await asyncio.to_thread(_mismatches, escalation.pattern, texts):
            return check
    return None


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text or "{}"), dict)
    except msgspec.DecodeError:
        return False


async def _is_invalid(request: InferenceRequest, texts: Sequence[str]) -> bool:
    """Return whether a text is not valid under the schema of the request, or not JSON if that is requested."""
    structured = request.structured
    schema = None if request.analysis.checked is None else request.analysis.checked.answer
    if schema is None and structured is not None and structured.constraint_type == "json_schema":
        schema = structured.text
    if schema is None and structured is not None and structured.constraint_type == "json_object":
        return not all(_is_object(text or "null") for text in texts)
    if schema is None:
        return False
    from millrace.gateway.protocols.schema_check import all_valid  # few requests need its libraries

    return await asyncio.to_thread(all_valid, [(schema, text) for text in texts]) is False


def _mismatches(pattern: str, texts: Sequence[str]) -> bool:
    answer_pattern = compile_pattern(pattern)
    return any(answer_pattern.matches(text) is False for text in texts if len(text) <= MAX_PATTERN_CHARACTERS)
