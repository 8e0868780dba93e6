"""Ends, usage and failures of requests in an engine with a fake model."""

from __future__ import annotations

import pytest

from inference_worker.contract.request import RequestOutput, RequestRejected, TokenCounts
from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.sequences.step import SchedulerOutput
from tests.support.engine.fakes import EOS, fake_engine, request, run, tokens_of


def answer(script: list[int], **params: object) -> list[RequestOutput]:
    engine, _ = fake_engine(choose=lambda seq: script[seq.num_output_tokens])
    engine.add_request(request("x", 20, **params))
    return run(engine)["x"]


def test_a_stop_token_ends_the_output() -> None:
    outputs = answer([10, 42, 12], max_tokens=3, stop_token_ids=(42,))
    assert tokens_of(outputs) == [10, 42]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", 42)


def test_eos_ends_the_output_unless_ignored() -> None:
    outputs = answer([10, EOS, 12], max_tokens=3)
    assert tokens_of(outputs) == [10, EOS]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)
    assert tokens_of(answer([10, EOS, 12], max_tokens=3, ignore_eos=True)) == [10, EOS, 12]


def test_max_tokens_ends_the_output() -> None:
    outputs = answer([10, 11, 12], max_tokens=2)
    assert tokens_of(outputs) == [10, 11]
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].usage == TokenCounts(uncached=20, output=2)


def test_only_the_last_output_has_a_finish_reason() -> None:
    outputs = answer([10, 11, 12], max_tokens=3)
    assert [o.finished for o in outputs] == [False, False, True]
    assert [o.usage is None for o in outputs] == [True, True, False]


def test_a_cache_hit_is_counted_as_read_with_its_recomputed_last_block() -> None:
    engine, runner = fake_engine(20)
    for name in ("first", "second"):
        engine.add_request(request(name, 48))
        usage = run(engine)[name][-1].usage
        assert usage is not None
        assert usage.prompt == 48
    assert usage == TokenCounts(cache_read=48, output=1)
    assert runner.steps == [{"first": 48}, {"second": 16}]
    assert engine.stats().cached_tokens == 48


def test_another_salt_has_no_cache_hit() -> None:
    engine, _ = fake_engine(20)
    for name in ("first", "second"):
        engine.add_request(request(name, 48, salt=name.encode()))
        assert run(engine)[name][-1].usage == TokenCounts(uncached=48, output=1)


@pytest.mark.parametrize("steps", range(9))
def test_an_abort_releases_everything_at_any_time(steps: int) -> None:
    engine, _ = fake_engine(20, max_num_batched_tokens=64)
    engine.add_request(request("other", [7] * 10, max_tokens=20))
    engine.add_request(request("x", 200, max_tokens=4))  # four steps of prompt, three more of output
    seen: list[RequestOutput] = []
    for _ in range(steps):
        seen += [o for o in engine.step() if o.request_id == "x"]
    last = engine.abort("x")
    engine.check_integrity()
    if steps >= 7:
        assert last is None
        assert seen[-1].finish_reason == "length"
    else:
        assert last is not None
        assert last.finish_reason == "cancelled"
        assert last.usage == (TokenCounts(uncached=200, output=len(tokens_of(seen))) if steps else TokenCounts())
    assert engine.abort("x") is None
    assert len(tokens_of(run(engine)["other"])) + steps == 20
    assert engine.stats().kv_blocks_used == 0


def test_a_token_computed_after_an_abort_is_dropped() -> None:
    engine, runner = fake_engine()
    engine.add_request(request("x", 20, max_tokens=5))
    engine.step()
    aborted: list[RequestOutput | None] = []
    runner.during = lambda _: aborted.append(engine.abort("x"))
    assert engine.step() == []
    assert aborted[0] is not None
    assert aborted[0].usage == TokenCounts(uncached=20, output=1)
    assert engine.stats().output_tokens == 1
    engine.check_integrity()


def test_an_unknown_request_cannot_be_aborted() -> None:
    engine, _ = fake_engine()
    assert engine.abort("unknown") is None


def test_an_id_of_a_running_request_is_rejected() -> None:
    engine, _ = fake_engine()
    engine.add_request(request("x", 20))
    with pytest.raises(RequestRejected):
        engine.add_request(request("x", 20))
    run(engine)
    engine.add_request(request("x", 20))


def test_a_failed_step_ends_its_requests_and_keeps_the_cache_consistent() -> None:
    engine, runner = fake_engine(20, max_num_seqs=1)
    engine.add_request(request("in it", 40))
    engine.add_request(request("waiting", [5] * 40))

    def fail(_: SchedulerOutput) -> None:
        runner.during = lambda _: None
        raise RuntimeError("out of memory")

    runner.during = fail
    outputs = run(engine)
    [failed] = outputs["in it"]
    assert failed.error is not None
    assert failed.error.code == "internal_error"
    assert "out of memory" not in failed.error.message
    assert outputs["waiting"][-1].finish_reason == "length"
    engine.add_request(request("again", 40))
    assert run(engine)["again"][-1].usage == TokenCounts(
        uncached=40, output=1
    )  # no block of the failed step was cached


def test_one_requests_error_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = fake_engine()
    for name in ("good", "bad"):
        engine.add_request(request(name, [ord(name[0])] * 20, max_tokens=3))

    real = engine.scheduler.complete

    def complete(scheduled: object, num_tokens: int) -> bool:
        if scheduled.seq.request_id == "bad":  # type: ignore[attr-defined]
            raise ValueError("a bug")
        return real(scheduled, num_tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.scheduler, "complete", complete)
    outputs = run(engine)
    assert outputs["bad"][-1].error is not None
    assert tokens_of(outputs["good"]) == [100, 101, 102]


def test_stats_count_steps_and_tokens() -> None:
    engine, _ = fake_engine(20)
    for name in ("a", "b"):
        engine.add_request(request(name, [ord(name)] * 10, max_tokens=3))
    run(engine)
    stats = engine.stats()
    assert (stats.steps, stats.batched_sequences, stats.batched_tokens) == (3, 6, 24)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (20, 0, 6)
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks) == (0, 0, 20)


def test_a_request_without_a_seed_gets_a_random_one() -> None:
    seeds = {Sequence(request("x", 3), None).seed for _ in range(5)}
    assert len(seeds) == 5
    assert Sequence(request("x", 3, seed=7), None).seed == 7
