"""Validation of complete and streamed answers under schemas that are enforced in part.

The end of such an answer becomes a `CheckedEnd`, so the writers of all dialects can report the result. A resumed stream
has the same result, since the schemas are stored with the response spec.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from inference_worker.contract.messages import AnswerEvent, End, Tokens
from millrace.gateway.core.types import CheckedSchemas, ResponseSpec
from millrace.gateway.protocols.answer_parts import AnswerParts, split_answer

FIELD = "schema_valid"


class CheckedEnd(End, frozen=True, array_like=True, tag="e"):
    """The end of an answer that was validated."""

    schema_valid: bool = False


async def checked_events(
    events: AsyncIterator[AnswerEvent], response_spec: Callable[[], Awaitable[ResponseSpec]]
) -> AsyncIterator[AnswerEvent]:
    """Yield the events of an answer, with a `CheckedEnd` if it is validated under schemas of its response spec."""
    spec: ResponseSpec | None = None
    tokens: list[AnswerEvent] = []
    async for event in events:
        if spec is None:
            spec = await response_spec()
        if spec.checked is not None and isinstance(event, Tokens):
            tokens.append(event)
        if spec.checked is not None and isinstance(event, End):
            valid = await _are_valid(spec.checked, split_answer(spec, [*tokens, event], spec.answers))
            if valid is not None:
                yield CheckedEnd(**msgspec.structs.asdict(event), schema_valid=valid)
                return
        yield event


async def _are_valid(schemas: CheckedSchemas, choices: Sequence[AnswerParts]) -> bool | None:
    """Return whether all parts that have a schema are valid under it; None if that cannot be determined."""
    from millrace.gateway.protocols.schema_check import all_valid  # few requests need its libraries

    pairs: list[tuple[str, str]] = []
    for choice in choices:
        if schemas.answer is not None and not choice.calls:
            pairs.append((schemas.answer, choice.text))
        for number, arguments in choice.calls.items():
            schema = schemas.tools.get(choice.names.get(number, ""))
            if schema is not None:
                pairs.append((schema, arguments or "{}"))
    return await asyncio.to_thread(all_valid, pairs) if pairs else True


def validity(end: AnswerEvent) -> dict[str, Any]:
    """Return the field of a response or of its last event with the result of the validation, if there is one."""
    return {FIELD: end.schema_valid} if isinstance(end, CheckedEnd) else {}
