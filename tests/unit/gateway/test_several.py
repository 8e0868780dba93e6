"""Several prompts of a request: their events form one response with more choices."""

from __future__ import annotations

from collections.abc import AsyncIterator

from inference_worker.contract.messages import AnswerEvent, End, Finished, Tokens
from inference_worker.contract.request import TokenCounts
from millrace.gateway.core.multi_prompt import merge_events, part_id, whole_id


async def events(*given: AnswerEvent) -> AsyncIterator[AnswerEvent]:
    for event in given:
        yield event


def part(number: int) -> list[AnswerEvent]:
    name = part_id("req_1", number)
    return [
        Tokens(name, 1, 0, [5], f"{number}a", index=0, prompt=TokenCounts(uncached=2, cache_read=3)),
        Tokens(name, 1, 1, [6], f"{number}b", index=1),
        Finished(name, 1, 2, 1, "stop", "x"),
        End(name, 1, 3, "length", None, TokenCounts(uncached=2, cache_read=3, output=2)),
    ]


async def test_events_of_several_prompts_are_merged() -> None:
    merged = [event async for event in merge_events([events(*part(0)), events(*part(1))], 2)]
    tokens = [event for event in merged if isinstance(event, Tokens)]
    assert [(event.index, event.text) for event in tokens] == [(0, "0a"), (1, "0b"), (2, "1a"), (3, "1b")]
    prompts = [event.prompt for event in tokens if event.prompt]
    assert prompts == [TokenCounts(uncached=2, cache_read=3), TokenCounts(uncached=4, cache_read=6)]
    ends = [(event.index, event.finish_reason, event.stop_reason) for event in merged if isinstance(event, Finished)]
    assert ends == [(1, "stop", "x"), (0, "length", None), (3, "stop", "x")]
    (end,) = (event for event in merged if isinstance(event, End))
    assert end is merged[-1]
    assert end.usage == TokenCounts(uncached=4, cache_read=6, output=4)


async def test_events_of_one_prompt_are_unchanged() -> None:
    assert [event async for event in merge_events([events(*part(0))], 2)] == part(0)


def test_an_event_names_its_prompt() -> None:
    assert {whole_id(part_id("req_1", number)) for number in range(3)} == {"req_1"}
