"""One request with several prompts: each is a request of its own in the engine, and all are answered as one.

The first has the request's name, the others a number after it. Prompt after prompt their events are told as those of
one request with correspondingly more answers; so the same logs give the same stream, however the parts ran.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence

import msgspec

from inference_worker.contract.messages import AnswerEvent, End, Finished, Tokens
from inference_worker.contract.request import TokenUsage


def part_id(request_id: str, number: int) -> str:
    """Return the name under which a prompt is generated from."""
    return f"{request_id}.{number}" if number else request_id


def whole_id(name: str) -> str:
    """Return the request's name, by which its readers know it, from a part's."""
    return name.partition(".")[0]


def added(one: TokenUsage, other: TokenUsage) -> TokenUsage:
    return TokenUsage(
        **{each.name: getattr(one, each.name) + getattr(other, each.name) for each in dataclasses.fields(TokenUsage)}
    )


def merged(parts: Sequence[AsyncIterator[AnswerEvent]], n: int) -> AsyncIterator[AnswerEvent]:
    """Return the parts' events as one request's. `n`: answers to each prompt."""
    return parts[0] if len(parts) == 1 else _merged(parts, n)


async def _merged(parts: Sequence[AsyncIterator[AnswerEvent]], n: int) -> AsyncIterator[AnswerEvent]:
    prompt, usage = TokenUsage(), TokenUsage()
    for number, events in enumerate(parts):
        unfinished = set(range(number * n, (number + 1) * n))
        async for event in events:
            if isinstance(event, End):
                usage = added(usage, event.usage)
                if number == len(parts) - 1:
                    yield msgspec.structs.replace(event, usage=usage)
                    return
                for index in sorted(unfinished):
                    yield Finished(
                        event.request_id, event.attempt, event.seq, index, event.finish_reason, event.stop_reason
                    )
                continue
            if isinstance(event, Tokens):
                event = msgspec.structs.replace(event, index=event.index + number * n)
                if event.prompt is not None:
                    prompt = added(prompt, event.prompt)
                    event = msgspec.structs.replace(event, prompt=prompt)
            elif isinstance(event, Finished):
                event = msgspec.structs.replace(event, index=event.index + number * n)
                unfinished.discard(event.index)
            yield event
