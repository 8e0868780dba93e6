"""The sorted queue makes the same decisions as a scan of all waiting tenants."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.contract.request import ServiceClass
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.scheduling.ordered import GrowingOrder
from inference_worker.engine.sequences.step import SchedulerOutput
from tests.support.engine.fakes import Clock, MemoryRunner, distinct, fake_engine, request
from tests.support.engine.scanning_scheduler import use_scanning_scheduler

BLOCK = 4
BATCH, FLEX, DEFAULT, PRIORITY = (
    ServiceClass.BATCH, ServiceClass.FLEX, ServiceClass.DEFAULT, ServiceClass.PRIORITY,
)  # fmt: skip


class Pair:
    """Two engines with the same requests at the same times: one with the sorted queue, one with the reference."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.clock = Clock()
        self.tenants = [f"t{n}" for n in range(rng.choice([2, 5, 12, 30]))]
        self.weights = {tenant: rng.choice([0.5, 1.0, 1.0, 4.0]) for tenant in self.tenants}
        self.classes = rng.choice([[DEFAULT], [DEFAULT, FLEX], [*ServiceClass], [FLEX, BATCH, DEFAULT, DEFAULT]])
        cap = rng.choice([0, 3, 7])
        settings: dict[str, float] = {
            "max_num_seqs": rng.choice([1, 2, 4, 8]),
            "max_num_batched_tokens": rng.choice([8, 16, 64, 256]),
            "long_prefill_token_threshold": cap,
            "max_long_partial_prefills": rng.choice([0, 1, 2]) if cap else 0,
        }
        blocks, async_scheduling = rng.choice([12, 24, 60, 400]), rng.random() < 0.3
        self.room = blocks * BLOCK
        self.engines: list[LLMEngine] = []
        self.decisions: list[list[object]] = [[], []]
        for index in range(2):
            runner = MemoryRunner(blocks, BLOCK, num_host_blocks=0, async_scheduling=async_scheduling)
            engine, _ = fake_engine(runner=runner, clock=self.clock, block_size=BLOCK, **settings)
            self.engines.append(use_scanning_scheduler(engine) if index else engine)
            self.record(index)
        self.names: list[str] = []

    def record(self, index: int) -> None:
        scheduler = self.engines[index].scheduler
        schedule = scheduler.schedule

        def recorded(now: float = 0.0) -> SchedulerOutput:
            output = schedule(now)
            self.decisions[index].append(
                {
                    "scheduled": [(s.seq.request_id, s.seq.index, s.start, s.num_new_tokens) for s in output.scheduled],
                    "preempted": [(seq.request_id, seq.index) for seq in output.preempted],
                    "exceeds_kv_cache": [(seq.request_id, seq.index) for seq in output.exceeds_kv_cache],
                    "expired": {(seq.request_id, seq.index) for seq in output.expired},
                    "running": [
                        (seq.request_id, seq.index, seq.rank, seq.fairness_preemptions) for seq in scheduler.running
                    ],
                    "waiting": {(seq.request_id, seq.index) for seq in scheduler.waiting},
                    "served": {tenant.name: tenant.served for tenant in scheduler.tenants.active()},
                }
            )
            return output

        scheduler.schedule = recorded  # type: ignore[method-assign]

    def arrive(self) -> None:
        rng = self.rng
        tenant = rng.choice(self.tenants)
        name = f"r{len(self.names)}"
        length = rng.choice([1, 3, 5, 9, 20, 40])
        answer = rng.choice([1, 2, 6, 12])
        family = rng.randrange(4)
        prompt = [10 + family] * 8 + list(range(20, 20 + length)) if family else distinct(length, len(self.names) % 900)
        service_class = rng.choice(self.classes)
        wanted = request(
            name, prompt[: self.room - answer], tenant=tenant, salt=tenant.encode(), weight=self.weights[tenant],
            service_class=service_class, priority=rng.choice([0, 0, 0, -1, 1]), max_tokens=answer,
            n=rng.choice([1, 1, 1, 1, 3]), arrival=self.clock.now - rng.choice([0.0, 0.0, 0.5]),
            expires_at=self.clock.now + 50.0 if service_class is BATCH and rng.random() < 0.5 else None,
        )  # fmt: skip
        self.names.append(name)
        for engine in self.engines:
            engine.add_request(wanted)

    def step(self) -> None:
        for engine in self.engines:
            engine.step()

    def event(self) -> None:
        kind = self.rng.random()
        if kind < 0.45:
            self.arrive()
        elif kind < 0.9:
            self.step()
            self.engines[0].check_integrity()
        elif kind < 0.94 and self.names:
            name = self.rng.choice(self.names[-60:])
            for engine in self.engines:
                engine.abort(name)
        else:
            self.clock.now += self.rng.choice([0.01, 0.1, 1.0, 5.0, 19.9, 20.0, 0.1 + 0.2])

    def compare(self) -> None:
        for number, (mine, reference) in enumerate(zip(*self.decisions, strict=True)):
            assert mine == reference, f"step {number}"
        for decisions in self.decisions:
            decisions.clear()


@pytest.mark.parametrize("seed", range(12))
def test_decisions_equal_those_of_a_scan_of_all_tenants(seed: int) -> None:
    compare_decisions(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 200))
def test_many_decisions_equal_those_of_a_scan_of_all_tenants(seed: int) -> None:
    compare_decisions(seed)


def compare_decisions(seed: int) -> None:
    pair = Pair(random.Random(seed))
    for _ in range(300):
        pair.event()
        pair.compare()
    for _ in range(5000):
        if not pair.engines[0].has_unfinished():
            break
        pair.step()
        pair.clock.now += 0.5
        pair.compare()
    assert not any(engine.has_unfinished() for engine in pair.engines)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "grow", "discard", "read"]), st.integers(0, 9), st.sampled_from([0.0, 1.0, 2.5])
        )
    )
)
def test_a_growing_order_equals_a_sorted_list(events: list[tuple[str, int, float]]) -> None:
    keys = dict.fromkeys(range(10), 0.0)
    order: GrowingOrder[int] = GrowingOrder(lambda item: keys[item])
    inside: set[int] = set()
    for kind, item, amount in [*events, ("read", 0, 0.0)]:
        if kind == "add" and item not in inside:
            inside.add(item)
            order.add(item, item)
        elif kind == "grow":
            keys[item] += amount
        elif kind == "discard":
            inside.discard(item)
            order.discard(item)
        elif kind == "read":
            wanted = sorted(inside, key=lambda item: (keys[item], item))
            assert order.list_first(3) == wanted[:3]
            assert order.list_first(20) == wanted
        assert set(order) == inside
        assert len(order) == len(inside)
        assert (item in order) == (item in inside)
