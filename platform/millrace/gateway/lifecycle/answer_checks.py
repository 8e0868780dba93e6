"""Checks of a complete answer, by which a routing policy escalates to its next target."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from inference_worker.contract.messages import AnswerEvent, End, Tokens
from millrace.gateway.core.types import InferenceRequest, ResponseSpec
from millrace.gateway.protocols.tool_parsers.base import AnswerText, CallArguments, CallStart, Piece
from millrace.gateway.protocols.tool_parsers.registry import make_parser
from millrace.gateway.protocols.tools import UPSTREAM_CALLS
from tenants.routing_policies.answer_pattern import compile_pattern
from tenants.routing_policies.policy import Escalation

MAX_PATTERN_CHARACTERS = 2**18  # of an answer; a longer one is not matched


@dataclass
class AnswerParts:
    """The text and the tool calls of one choice."""

    text: str = ""
    calls: dict[int, str] = field(default_factory=dict)  # number -> arguments


async def failed_check(
    escalation: Escalation, request: InferenceRequest, spec: ResponseSpec, events: Sequence[AnswerEvent]
) -> str | None:
    """Return the first check that an answer fails; None if it passes. Checks that cannot be decided pass."""
    choices = _choices(spec, events)
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


def _choices(spec: ResponseSpec, events: Sequence[AnswerEvent]) -> list[AnswerParts]:
    by_index: defaultdict[int, list[Tokens]] = defaultdict(list)
    for event in events:
        if isinstance(event, Tokens):
            by_index[event.index].append(event)
    end = events[-1] if events else None
    is_truncated = isinstance(end, End) and end.finish_reason == "length"
    return [_parts(spec, by_index[index], is_truncated) for index in range(max(1, spec.n))]


def _parts(spec: ResponseSpec, events: Sequence[Tokens], is_truncated: bool) -> AnswerParts:
    if not spec.tools or spec.tool_format == UPSTREAM_CALLS:
        parts = AnswerParts("".join(event.text for event in events))
        for event in events:
            for call in event.calls:
                parts.calls[call.number] = parts.calls.get(call.number, "") + call.arguments
        return parts
    parser = make_parser(spec.tool_format, spec.tools, spec.max_calls, spec.parameter_types)
    pieces: list[Piece] = [*parser.read(*events), *parser.close(is_truncated=is_truncated)]
    parts = AnswerParts("".join(piece.text for piece in pieces if isinstance(piece, AnswerText)))
    for piece in pieces:
        if isinstance(piece, CallStart):
            parts.calls[piece.number] = ""
        elif isinstance(piece, CallArguments):
            parts.calls[piece.number] = parts.calls.get(piece.number, "") + piece.text
    return parts


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text or "{}"), dict)
    except msgspec.DecodeError:
        return False


async def _is_invalid(request: InferenceRequest, texts: Sequence[str]) -> bool:
    """Return whether a text is not valid under the schema of the request, or not JSON if that is requested."""
    structured = request.structured
    schema = request.checked_schema
    if schema is None and structured is not None and structured.constraint_type == "json_schema":
        schema = structured.text
    if schema is None and structured is not None and structured.constraint_type == "json_object":
        return not all(_is_object(text or "null") for text in texts)
    if schema is None:
        return False
    from millrace.gateway.protocols.schema_check import are_valid  # few requests need its libraries

    return await asyncio.to_thread(are_valid, schema, texts) is False


def _mismatches(pattern: str, texts: Sequence[str]) -> bool:
    answer_pattern = compile_pattern(pattern)
    return any(answer_pattern.matches(text) is False for text in texts if len(text) <= MAX_PATTERN_CHARACTERS)
