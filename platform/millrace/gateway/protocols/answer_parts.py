"""The texts and the tool calls of a complete answer, in any dialect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from inference_worker.contract.messages import AnswerEvent, End, Tokens
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.protocols.tool_parsers.base import AnswerText, CallArguments, CallStart, Piece
from millrace.gateway.protocols.tool_parsers.registry import parser_of
from millrace.gateway.protocols.tools import UPSTREAM_CALLS


@dataclass
class AnswerParts:
    """The text and the tool calls of one choice."""

    text: str = ""
    names: dict[int, str] = field(default_factory=dict)  # number of a call -> name of its tool
    calls: dict[int, str] = field(default_factory=dict)  # number of a call -> arguments


def split_answer(spec: ResponseSpec, events: Sequence[AnswerEvent], choices: int) -> list[AnswerParts]:
    """Return the parts of each choice."""
    by_index: defaultdict[int, list[Tokens]] = defaultdict(list)
    for event in events:
        if isinstance(event, Tokens):
            by_index[event.index].append(event)
    end = events[-1] if events else None
    is_truncated = isinstance(end, End) and end.finish_reason == "length"
    return [_split_choice(spec, by_index[index], is_truncated) for index in range(max(1, choices))]


def _split_choice(spec: ResponseSpec, events: Sequence[Tokens], is_truncated: bool) -> AnswerParts:
    if not spec.tools or spec.tool_format == UPSTREAM_CALLS:
        parts = AnswerParts("".join(event.text for event in events))
        for event in events:
            for call in event.calls:
                parts.names[call.number] = parts.names.get(call.number, "") + call.name
                parts.calls[call.number] = parts.calls.get(call.number, "") + call.arguments
        return parts
    parser = parser_of(spec)
    pieces: list[Piece] = [*parser.read(*events), *parser.close(is_truncated=is_truncated)]
    parts = AnswerParts("".join(piece.text for piece in pieces if isinstance(piece, AnswerText)))
    for piece in pieces:
        if isinstance(piece, CallStart):
            parts.names[piece.number], parts.calls[piece.number] = piece.name, ""
        elif isinstance(piece, CallArguments):
            parts.calls[piece.number] = parts.calls.get(piece.number, "") + piece.text
    return parts
