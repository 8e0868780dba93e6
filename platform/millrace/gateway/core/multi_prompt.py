"""Requests with several prompts: the engine runs one execution per prompt, and the client receives one response.

The first execution has the request's ID, the others add a number to it. Their event logs are merged in the order of the
prompts, as the choices of one request. The merged stream depends only on the logs, so it can be resumed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from inference_worker.contract.messages import AnswerEvent, End, Finished, Tokens
from inference_worker.contract.request import TokenCounts


def part_id(request_id: str, number: int) -> str:
    """Return the execution's request ID for the prompt with this number."""
    return f"{request_id}.{number}" if number else request_id


def whole_id(name: str) -> str:
    """Return the ID of the client's request for the request ID of one of its executions."""
    return name.partition(".")[0]


def merge_events(parts: Sequence[AsyncIterator[AnswerEvent]], n: int) -> AsyncIterator[AnswerEvent]:
    """Merge the event streams of all prompts into one. `n` is the number of choices for each prompt."""
    return parts[0] if len(parts) == 1 else _merge_events(parts, n)


async def _merge_events(parts: Sequence[AsyncIterator[AnswerEvent]], n: int) -> AsyncIterator[AnswerEvent]:
    prompt, usage = TokenCounts(), TokenCounts()
    for number, events in enumerate(parts):
        unfinished = set(range(number * n, (number + 1) * n))
        async for event in events:
            if isinstance(event, End):
                usage += event.usage
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
                    prompt += event.prompt
                    event = msgspec.structs.replace(event, prompt=prompt)
            elif isinstance(event, Finished):
                event = msgspec.structs.replace(event, index=event.index + number * n)
                unfinished.discard(event.index)
            yield event
