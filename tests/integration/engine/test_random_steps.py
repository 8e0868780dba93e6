"""Random operations on the engine: after each step, all accounts are correct and each request's blocks contain its own
tokens. Every request ends correctly, including one of the model's maximum size."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inference_worker.contract.request import CacheBreakpoint, RequestOutput, RequestRejected, ServiceClass, TokenCounts
from inference_worker.engine.sequences.step import SchedulerOutput
from tests.support.engine.fakes import Clock, GuessingDrafter, MemoryRunner, fake_engine, request, token_at

BLOCK = 4
MAX_LENGTH = 80  # tokens of a request, also if any length fits
_CLASSES = st.sampled_from([ServiceClass.DEFAULT, ServiceClass.DEFAULT, *ServiceClass])


class Engine(RuleBasedStateMachine):
    """Arrivals of several tenants and classes, pins, several choices, aborts (also during a step), failed steps, jumps
    of the clock, and right and wrong drafts, with a cache that is always too small."""

    @initialize(
        blocks=st.integers(3, 16),
        host=st.sampled_from([0, 3, 20]),
        batch=st.integers(1, 5),
        tokens=st.sampled_from([5, 8, 16, 64]),
        cap=st.sampled_from([0, 3, 7]),
        async_scheduling=st.booleans(),
        windows=st.sampled_from([(0,), (0,), (6,), (0, 9), (0, 3, 3)]),
        guesses=st.one_of(st.just([]), st.lists(st.booleans(), min_size=1, max_size=20)),
    )
    def start(
        self,
        blocks: int,
        host: int,
        batch: int,
        tokens: int,
        cap: int,
        async_scheduling: bool,
        windows: tuple[int, ...],
        guesses: list[bool],
    ) -> None:
        self.clock = Clock()
        blocks *= len(windows)
        self.runner = MemoryRunner(
            blocks, BLOCK, num_host_blocks=host, async_scheduling=async_scheduling, windows=windows
        )
        self.engine, _ = fake_engine(
            runner=self.runner,
            windows=windows,
            drafters=[GuessingDrafter(guesses)] if guesses else None,
            clock=self.clock,
            block_size=BLOCK,
            max_num_seqs=batch,
            max_num_batched_tokens=tokens,
            long_prefill_token_threshold=cap,
            max_long_partial_prefills=min(cap, 1),
        )
        self.budget = tokens
        demand = self.engine.scheduler.cache.demand
        self.room = min(demand.max_tokens(blocks, MAX_LENGTH), MAX_LENGTH)
        self.asked: dict[str, tuple[int, int, int]] = {}  # prompt tokens, maximum output tokens, choices
        self.got: dict[str, int] = {}
        self.places: Counter[tuple[str, int]] = Counter()  # output tokens of each sequence
        self.ended: dict[str, RequestOutput] = {}
        self.number = 0

    @rule(
        length=st.integers(1, 40),
        answer=st.integers(1, 12),
        family=st.integers(0, 2),
        tenant=st.sampled_from("abc"),
        service_class=_CLASSES,
        priority=st.integers(-1, 1),
        points=st.lists(st.integers(1, 48), max_size=2),
        n=st.sampled_from([1, 1, 1, 2, 4]),
    )
    def arrive(
        self,
        length: int,
        answer: int,
        family: int,
        tenant: str,
        service_class: ServiceClass,
        priority: int,
        points: list[int],
        n: int,
    ) -> None:
        prompt = [10 + family] * 8 + list(range(20, 20 + length)) if family else list(range(10, 10 + length))
        breakpoints = tuple(CacheBreakpoint(p, 300 if i else 3600) for i, p in enumerate(sorted(points)))
        self.submit(
            prompt, answer, n, tenant=tenant, salt=tenant.encode(), service_class=service_class, priority=priority,
            breakpoints=breakpoints, weight={"a": 1.0, "b": 1.0, "c": 4.0}[tenant],
            expires_at=self.clock.now + 100.0 if service_class is ServiceClass.BATCH else None,
        )  # fmt: skip

    @rule(answer=st.integers(1, 12), tenant=st.sampled_from("abc"))
    def arrive_as_large_as_can_be(self, answer: int, tenant: str) -> None:
        self.submit(list(range(50, 50 + max(1, self.room - answer))), min(answer, self.room - 1), 1, tenant=tenant)

    def submit(self, prompt: list[int], answer: int, n: int, **more: object) -> None:
        self.number += 1
        name = str(self.number)
        wanted = request(name, prompt, arrival=self.clock.now, max_tokens=answer, n=n, **more)  # type: ignore[arg-type]
        try:
            self.engine.add_request(wanted)
        except RequestRejected as rejected:
            assert rejected.code == "context_length_exceeded"
            assert len(prompt) + answer > self.room
        else:
            assert len(prompt) + answer <= self.room
            self.asked[name] = (len(prompt), answer, n)

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 50))
    def abort(self, pick: int) -> None:
        name = list(self.asked)[pick % len(self.asked)]
        output = self.engine.abort(name)
        assert (output is None) == (name in self.ended)
        if output is not None:
            self.take([output])

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.take(self.engine.step())
            self.engine.check_integrity()
            assert sum(self.runner.steps[-1].values()) <= self.budget if self.runner.steps else True

    @rule(seconds=st.sampled_from([0.01, 5.0, 30.0, 301.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(pick=st.integers(0, 5))
    def abort_during_a_step(self, pick: int) -> None:
        def during(output: SchedulerOutput) -> None:
            self.runner.during = lambda _: None
            last = self.engine.abort(output.scheduled[pick % len(output.scheduled)].seq.request_id)
            assert last is not None
            self.take([last])

        self.runner.during = during
        self.take(self.engine.step())
        self.runner.during = lambda _: None

    @rule()
    def fail_a_step(self) -> None:
        def during(_: SchedulerOutput) -> None:
            raise RuntimeError("broken")

        self.runner.during = during
        self.take(self.engine.step())
        self.runner.during = lambda _: None

    @rule()
    def reset(self) -> None:
        assert self.engine.reset_prefix_cache() == (self.engine.stats().kv_blocks_used == 0)

    def take(self, outputs: list[RequestOutput]) -> None:
        assert not self.runner.errors
        for output in outputs:
            name = output.request_id
            assert name not in self.ended, "an output after the last"
            self.got[name] = self.got.get(name, 0) + len(output.token_ids)
            place = name, output.index
            assert output.token_ids == [token_at(self.places[place] + i) for i in range(len(output.token_ids))]
            self.places[place] += len(output.token_ids)
            if output.usage is None:
                continue
            self.ended[name] = output
            prompt, answer, n = self.asked[name]
            assert output.finished
            assert output.usage == TokenCounts() or output.usage.prompt == prompt
            assert output.usage.output == self.got[name] <= answer * n
            if output.finish_reason == "length":
                assert self.got[name] == answer * n

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.submit(list(range(50, 50 + self.room - 1)), 1, 1, tenant="late")
        for _ in range(4000):
            if not self.engine.has_unfinished():
                break
            self.clock.now += 0.01
            self.take(self.engine.step())
        assert set(self.ended) == set(self.asked), "a request was forgotten"
        assert self.ended[str(self.number)].finish_reason == "length"
        assert self.engine.stats().kv_blocks_used == 0
        assert self.engine.reset_prefix_cache()


def _machine(examples: int) -> type[Engine.TestCase]:  # type: ignore[name-defined]
    case = Engine.TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


TestRandomSteps = _machine(150)


@pytest.mark.slow
class TestManyRandomSteps:
    def test_it(self) -> None:
        from hypothesis.stateful import run_state_machine_as_test

        run_state_machine_as_test(Engine, settings=settings(max_examples=3000, stateful_step_count=60, deadline=None))
