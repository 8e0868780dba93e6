"""Reasons of cache misses."""

from __future__ import annotations

from inference_worker.contract.request import CacheReport
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.fakes import distinct, fake_engine, request, run


def report(engine: LLMEngine, name: str, prompt: list[int], **more: object) -> CacheReport:
    engine.add_request(request(name, prompt, **more))  # type: ignore[arg-type]
    last = run(engine)[name][-1]
    assert last.cache is not None
    return last.cache


def test_a_prompt_shorter_than_a_block_is_too_short() -> None:
    engine, _ = fake_engine(20)
    assert report(engine, "a", distinct(15, 1)) == CacheReport("too_short")
    assert report(engine, "b", distinct(15, 1)) == CacheReport("too_short")


def test_the_first_use_and_the_next() -> None:
    engine, _ = fake_engine(20)
    assert report(engine, "first", distinct(50, 1)) == CacheReport("first_use")
    assert report(engine, "second", distinct(50, 1)) == CacheReport()
    assert report(engine, "longer", [*distinct(50, 1), *range(30)]) == CacheReport()


def test_another_tenants_use_does_not_count() -> None:
    engine, _ = fake_engine(20)
    report(engine, "first", distinct(50, 1), salt=b"a")
    assert report(engine, "second", distinct(50, 1), salt=b"b") == CacheReport("first_use")


def test_a_changed_prefix_is_reported_with_its_token() -> None:
    engine, _ = fake_engine(20)
    prompt = distinct(80, 1)
    report(engine, "first", prompt)
    changed = [*prompt[:41], 999, *prompt[42:]]
    assert report(engine, "second", changed) == CacheReport("prefix_changed", 41)


def test_evicted_and_never_cached_prefixes_are_distinguished() -> None:
    engine, _ = fake_engine(6)
    report(engine, "first", distinct(50, 1))
    report(engine, "crowd", distinct(90, 2))
    assert report(engine, "again", distinct(50, 1)) == CacheReport("expired_or_evicted")
    assert report(engine, "new", distinct(50, 3)) == CacheReport("first_use")


def test_the_next_turn_of_a_conversation_reuses_the_output() -> None:
    engine, runner = fake_engine(20)
    prompt = distinct(40, 1)
    engine.add_request(request("turn 1", prompt, max_tokens=30))
    answer = [token for output in run(engine)["turn 1"] for token in output.token_ids]
    engine.add_request(request("turn 2", [*prompt, *answer, 5, 6, 7]))
    last = run(engine)["turn 2"][-1]
    assert runner.steps[-1] == {"turn 2": 73 - 64}  # the last token of an output is never computed
    assert last.usage is not None
    assert last.usage.cache_read == 64
    assert last.cache == CacheReport()


def test_a_request_for_prompt_logprobs_reads_no_cache() -> None:
    engine, runner = fake_engine(20)
    report(engine, "first", distinct(50, 1))
    engine.add_request(request("logprobs", distinct(50, 1), prompt_logprobs=1))
    last = run(engine)["logprobs"][-1]
    assert runner.steps[-1] == {"logprobs": 50}
    assert last.usage is not None
    assert (last.usage.uncached, last.cache) == (50, CacheReport())
