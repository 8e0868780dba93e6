"""Whatever comes, in whatever order: every account is right after every step, and every request ends right."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inference_worker.engine.request import RequestOutput, RequestRejected, TokenUsage
from inference_worker.engine.scheduler import SchedulerOutput
from tests.engine.fakes import fake_engine, request


class Engine(RuleBasedStateMachine):
    """Arrivals, aborts (also in the midst of a step), failed steps, on a cache that is always too small."""

    @initialize(
        blocks=st.integers(3, 12),
        batch=st.integers(1, 5),
        tokens=st.sampled_from([5, 8, 16, 64]),
        cap=st.sampled_from([0, 3, 7]),
    )
    def start(self, blocks: int, batch: int, tokens: int, cap: int) -> None:
        self.engine, self.runner = fake_engine(
            blocks, block_size=4, max_batch=batch, step_tokens=tokens, long_prompt_tokens=cap
        )
        self.budget = tokens
        self.asked: dict[str, tuple[int, int]] = {}
        self.got: dict[str, int] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.number = 0

    @rule(
        length=st.integers(1, 30),
        answer=st.integers(1, 12),
        family=st.integers(0, 2),
        salt=st.sampled_from([b"a", b"b"]),
    )
    def arrive(self, length: int, answer: int, family: int, salt: bytes) -> None:
        self.number += 1
        name = str(self.number)
        prompt = [10 + family] * 8 + list(range(20, 20 + length)) if family else list(range(10, 10 + length))
        try:
            self.engine.add_request(request(name, prompt, salt=salt, max_tokens=answer))
        except RequestRejected as rejected:
            assert rejected.code == "context_length_exceeded"
            assert len(prompt) + answer > self.engine.stats().kv_blocks * 4
        else:
            self.asked[name] = (len(prompt), answer)

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

    @rule(pick=st.integers(0, 5))
    def abort_during_a_step(self, pick: int) -> None:
        def during(output: SchedulerOutput) -> None:
            self.runner.during = lambda _: None
            seq = output.scheduled[pick % len(output.scheduled)].seq
            last = self.engine.abort(seq.request_id)
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

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.ended, "an output after the last"
            self.got[name] = self.got.get(name, 0) + len(output.token_ids)
            if output.finished:
                self.ended[name] = output
                prompt, answer = self.asked[name]
                assert output.usage is not None
                assert output.usage == TokenUsage() or output.usage.prompt == prompt
                assert output.usage.output == self.got[name] <= answer
                if output.finish_reason == "length":
                    assert self.got[name] == answer

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_unfinished():
                break
            self.take(self.engine.step())
        assert set(self.ended) == set(self.asked), "a request was forgotten"
        assert self.engine.stats().kv_blocks_used == 0
        assert self.engine.scheduler.cache.reset_prefix_cache()


TestRandomSteps = Engine.TestCase
TestRandomSteps.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
