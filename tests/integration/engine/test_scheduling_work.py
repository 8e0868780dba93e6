"""The cost of a step, an arrival and an abort is independent of the number of waiting tenants."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inference_worker.contract.request import ServiceClass
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.scheduling import fairness
from inference_worker.engine.scheduling.fairness import TenantShare
from tests.support.engine.fakes import Clock, fake_engine, request, run

BATCH, FLEX, DEFAULT = ServiceClass.BATCH, ServiceClass.FLEX, ServiceClass.DEFAULT
RUNNING = 8


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect a tenant's name whenever its counter is read or its activity is determined."""
    names: list[str] = []

    def read_served(share: TenantShare) -> float:
        names.append(share.name)
        return share.__dict__.get("served", 0.0)

    def read_active(share: TenantShare) -> bool:
        names.append(share.name)
        return share.num_waiting + share.num_running > 0

    def write_served(share: TenantShare, value: float) -> None:
        share.__dict__["served"] = value

    monkeypatch.setattr(TenantShare, "served", property(read_served, write_served), raising=False)
    monkeypatch.setattr(TenantShare, "active", property(read_active))
    return names


def loaded(
    waiting: int, running_class: ServiceClass, waiting_class: ServiceClass, *, clock: Clock | None = None, **more: float
) -> LLMEngine:
    """Return an engine with a full batch and this many waiting requests, each of a different tenant."""
    engine, _ = fake_engine(4000, max_num_seqs=RUNNING, max_num_batched_tokens=512, clock=clock, **more)
    for number in range(RUNNING):
        add(engine, f"running{number}", number, running_class)
    engine.step()
    for number in range(waiting):
        add(engine, f"waiting{number}", RUNNING + number, waiting_class)
    engine.step()  # arrivals are sorted in
    return engine


def add(engine: LLMEngine, name: str, number: int, service_class: ServiceClass, **more: object) -> None:
    prompt = [number % 1000, number // 1000, *range(10, 28)]
    engine.add_request(request(name, prompt, tenant=name, max_tokens=300, service_class=service_class, **more))  # type: ignore[arg-type]


def count(reads: list[str], action: Callable[[], object]) -> int:
    reads.clear()
    action()
    return len(reads)


@pytest.mark.parametrize(
    ("running_class", "waiting_class"),
    [(DEFAULT, FLEX), (DEFAULT, DEFAULT), (FLEX, DEFAULT), (DEFAULT, BATCH)],
    ids=["lower", "equal", "higher", "batch"],
)
def test_the_cost_of_a_step_is_independent_of_the_number_of_tenants(
    running_class: ServiceClass, waiting_class: ServiceClass, reads: list[str]
) -> None:
    def work(waiting: int) -> int:
        engine = loaded(waiting, running_class, waiting_class)
        return max(count(reads, engine.step) for _ in range(6))

    few, many = work(200), work(1000)
    assert many <= few + 10


def test_long_prompts_that_cannot_start_are_not_scanned(reads: list[str]) -> None:
    def work(waiting: int) -> int:
        engine, _ = fake_engine(
            4000,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=64,
            long_prefill_token_threshold=16,
            max_long_partial_prefills=1,
        )
        for number in range(waiting):
            prompt = [number % 1000, number // 1000, *range(10, 500)]
            engine.add_request(request(f"long{number}", prompt, tenant=f"long{number}"))
        engine.step()
        return max(count(reads, engine.step) for _ in range(3))

    assert work(300) <= work(100) + 10


def test_the_cost_of_an_arrival_and_an_abort_is_independent_of_the_number_of_tenants(reads: list[str]) -> None:
    def work(waiting: int) -> int:
        engine = loaded(waiting, DEFAULT, FLEX)
        arrival = count(reads, lambda: add(engine, "new", 5000, FLEX))
        step = count(reads, engine.step)
        return arrival + step + count(reads, lambda: engine.abort("waiting7")) + count(reads, engine.step)

    assert work(1000) <= work(200) + 10


def test_only_aging_requests_are_scanned_when_time_passes(reads: list[str]) -> None:
    clock = Clock()
    engine = loaded(500, DEFAULT, FLEX, clock=clock)
    clock.now = 19.0
    add(engine, "late", 5000, FLEX)
    assert count(reads, engine.step) < 100
    clock.now = 21.0  # the 500 are promoted by a class
    assert count(reads, engine.step) > 500
    clock.now = 38.0
    assert count(reads, engine.step) < 400
    clock.now = 39.5  # the last one too
    assert count(reads, engine.step) < 400


class Deadline(float):
    """A deadline that counts its comparisons with the time."""

    compared = 0

    def __le__(self, other: float) -> bool:
        Deadline.compared += 1
        return float(self) <= other


def test_deadlines_that_are_not_due_are_not_scanned() -> None:
    clock = Clock()
    engine = loaded(0, DEFAULT, DEFAULT, clock=clock)
    for number in range(300):
        add(engine, f"batch{number}", 100 + number, BATCH, expires_at=Deadline(100.0 + number))
    engine.step()
    Deadline.compared = 0
    engine.step()
    assert Deadline.compared <= 2
    clock.now = 104.5
    expired = [output.request_id for output in engine.step() if output.error]
    assert expired == [f"batch{number}" for number in range(5)]
    engine.check_integrity()


def test_more_tenants_can_wait_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "REMEMBERED_TENANTS", 5)
    engine, _ = fake_engine(400, max_num_seqs=2)
    for number in range(12):
        add(engine, f"tenant{number}", number, DEFAULT)
    assert len(engine.scheduler.tenants.active()) == 12
    outputs = run(engine)
    assert len(outputs) == 12
    assert not engine.scheduler.tenants.active()


def test_the_tenants_idle_for_longest_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "REMEMBERED_TENANTS", 3)
    tenants = fairness.FairShareTable()
    for name in "abc":
        tenants.count(tenants.arrive(name, 1.0), waiting=1)
    for name in "cab":
        tenants.count(tenants[name], waiting=-1)
    tenants.arrive("d", 1.0)
    with pytest.raises(KeyError):
        tenants["c"]
    assert {tenants[name].name for name in "abd"} == {"a", "b", "d"}
