"""Order of the tenants' queues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.gateway.dispatch.queues import FairQueue, QueueFull, _Tenant


def drain(queue: FairQueue[str]) -> list[str]:
    gone = []
    while (item := queue.pop()) is not None:
        gone.append(item)
    return gone


def test_one_tenants_requests_are_in_order() -> None:
    queue: FairQueue[str] = FairQueue(9)
    for name in "abc":
        queue.put(1, 1.0, 10, name)
    assert queue.peek() == "a"
    assert drain(queue) == ["a", "b", "c"]
    assert queue.pop() is queue.peek() is None


def test_a_tenant_with_many_requests_does_not_delay_another() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    for n in range(100):
        queue.put(1, 1.0, 10, f"crowd-{n}")
    for _ in range(5):
        queue.pop()
    queue.put(2, 1.0, 10, "alone")
    assert "alone" in [queue.pop() for _ in range(2)]


def test_an_idle_tenant_accumulates_no_credit() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    for n in range(50):
        queue.put(1, 1.0, 10, f"a{n}")
    for _ in range(20):
        queue.pop()
    for n in range(50):
        queue.put(2, 1.0, 10, f"b{n}")
    went = [queue.pop() or "" for _ in range(20)]
    assert 9 <= sum(name.startswith("b") for name in went) <= 11


@pytest.mark.parametrize("weight", [1.0, 2.0, 4.0])
def test_shares_follow_weights(weight: float) -> None:
    queue: FairQueue[str] = FairQueue(10_000)
    for n in range(1000):
        queue.put(1, 1.0, 10, f"a{n}")
        queue.put(2, weight, 10, f"b{n}")
    went = [queue.pop() or "" for _ in range(500)]
    assert sum(name.startswith("b") for name in went) == pytest.approx(500 * weight / (1 + weight), abs=2)
    assert queue.share(2, weight) == weight / (1 + weight)


def test_shares_are_measured_in_tokens() -> None:
    queue: FairQueue[str] = FairQueue(10_000)
    for n in range(1000):
        queue.put(1, 1.0, 100, f"large-{n}")
        queue.put(2, 1.0, 10, f"small-{n}")
    went = [queue.pop() or "" for _ in range(440)]
    assert sum(name.startswith("small") for name in went) == pytest.approx(400, abs=11)


def test_unused_tokens_are_refunded() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for n in range(10):
        queue.put(1, 1.0, 1000, f"a{n}")
        queue.put(2, 1.0, 1000, f"b{n}")
    assert queue.pop() == "a0"
    queue.refund(1, 990)  # it ended immediately
    assert [queue.pop(), queue.pop()] == ["b0", "a1"]


def test_long_jobs_delay_no_short_ones_and_are_not_starved() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for n in range(5):
        queue.put(1, 1.0, 1000, f"long-{n}", long=True)
    for n in range(30):
        queue.put(1, 1.0, 100, f"short-{n}")
    went = drain(queue)
    assert went.index("short-0") <= 1
    assert went.index("long-1") < went.index("short-29")
    assert went.index("short-9") < went.index("long-2")


def test_a_tenants_queue_is_limited() -> None:
    queue: FairQueue[str] = FairQueue(2)
    queue.put(1, 1.0, 1, "a")
    queue.put(1, 1.0, 1, "b", long=True)
    with pytest.raises(QueueFull):
        queue.put(1, 1.0, 1, "c")
    queue.put(2, 1.0, 1, "d")
    queue.requeue(1, 1.0, "e")  # returned after its turn: never rejected, and first again
    assert queue.pop() == "e"


def test_a_removed_request_is_not_sent() -> None:
    queue: FairQueue[str] = FairQueue(9)
    for name in "abc":
        queue.put(1, 1.0, 1, name, long=name == "b")
    assert queue.remove(1, "b")
    assert not queue.remove(1, "b")
    assert not queue.remove(7, "b")
    assert drain(queue) == ["a", "c"]
    queue.forget_idle()
    assert len(queue) == 0


jobs = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 500), st.booleans(), st.booleans()), max_size=80)


@given(jobs)
def test_every_request_is_sent_once(steps: list[tuple[int, int, bool, bool]]) -> None:
    """For any arrivals and removals, no request is lost or duplicated, and each tenant's queues keep their order."""
    queue: FairQueue[tuple[int, bool, int]] = FairQueue(1000)
    put, went = [], []
    for number, (tenant, cost, long, serve) in enumerate(steps):
        queue.put(tenant, float(tenant), cost, (tenant, long, number), long=long)
        put.append((tenant, long, number))
        if serve and (item := queue.pop()) is not None:
            went.append(item)
    while (item := queue.pop()) is not None:
        went.append(item)
    assert sorted(went) == sorted(put)
    for lane in {(tenant, long) for tenant, long, _ in put}:
        numbers = [number for tenant, long, number in went if (tenant, long) == lane]
        assert numbers == sorted(numbers)


class ScanningQueue(FairQueue[str]):
    """A reference that scans all tenants for the next tenant and the weights."""

    def peek(self) -> str | None:
        busy = [entry for entry in self._tenants.values() if len(entry)]
        entry = min(busy, key=lambda entry: entry.clock, default=None)
        return None if entry is None else entry.next_lane().waiting[0][0]

    def share(self, tenant: int, weight: float) -> float:
        others = sum(each.weight for name, each in self._tenants.items() if len(each) and name != tenant)
        return weight / (weight + others)


events = st.tuples(
    st.sampled_from(["put", "put", "pop", "remove", "refund", "put back", "forget"]),
    st.integers(0, 5), st.sampled_from([10, 40, 500]), st.booleans(), st.sampled_from([0.5, 1.0, 4.0]),
)  # fmt: skip


@given(st.lists(events, max_size=80))
def test_the_order_equals_that_of_a_scan_of_all_tenants(steps: list[tuple[str, int, int, bool, float]]) -> None:
    queue = ScanningQueue(20)
    names: list[str] = []
    for number, (kind, tenant, cost, long, weight) in enumerate(steps):
        if kind == "put" and not queue.is_full(tenant):
            names.append(f"{tenant}-{number}")
            queue.put(tenant, weight, cost, names[-1], long=long)
        elif kind == "put back":
            queue.requeue(tenant, weight, f"{tenant}-{number}")
        elif kind == "remove" and names:
            queue.remove(tenant, names[cost % len(names)])
        elif kind == "refund":
            queue.refund(tenant, cost)
        elif kind == "forget":
            queue.forget_idle()
        elif kind == "pop":
            wanted = queue.peek()
            assert queue.pop() == wanted
        assert FairQueue.peek(queue) == queue.peek()
        assert FairQueue.share(queue, tenant, weight) == queue.share(tenant, weight)


def test_the_cost_of_an_event_is_independent_of_the_number_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0
    count_waiting = _Tenant.__len__

    def counted(entry: _Tenant[str]) -> int:
        nonlocal looked_at
        looked_at += 1
        return count_waiting(entry)

    monkeypatch.setattr(_Tenant, "__len__", counted)
    queue: FairQueue[str] = FairQueue(9)
    for tenant in range(500):
        queue.put(tenant, 1.0, 10, f"{tenant}")
    looked_at = 0
    assert queue.peek() == "0"
    assert queue.pop() == "0"
    assert queue.share(7, 1.0) == 1 / 499
    queue.put(0, 1.0, 10, "again")
    queue.refund(3, 5)
    assert queue.peek() == "3"
    assert looked_at < 20


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 100)), min_size=10, max_size=200),
    st.lists(st.integers(0, 7), min_size=200, max_size=200),
    st.integers(0, 300),
)
def test_a_preferred_tenant_stays_within_the_bound(
    requests: list[tuple[int, int]], choices: list[int], ahead: int
) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue(1000)
    weights = {1: 1.0, 2: 1.0, 3: 2.0, 4: 0.5}
    for tenant, cost in requests:
        queue.put(tenant, weights[tenant], cost, (tenant, cost))
    served = dict.fromkeys(weights, 0.0)
    waiting = [tenant for tenant, _ in requests]
    largest = {tenant: max((cost for of, cost in requests if of == tenant), default=0) for tenant in weights}
    for choice in choices[: len(requests)]:
        found = queue.candidates(ahead, 8)
        assert found[0] == queue.peek()
        item = queue.pop(choice % len(found))
        assert item == found[choice % len(found)]
        tenant, cost = item or (0, 0)
        served[tenant] += cost / weights[tenant]
        waiting.remove(tenant)
        for f in set(waiting):
            for m in set(waiting):
                bound = ahead + max(largest[f] / weights[f], largest[m] / weights[m])
                assert served[f] - served[m] <= bound + 1e-6


def test_only_tenants_within_the_advantage_are_candidates() -> None:
    queue: FairQueue[str] = FairQueue(9)
    for name in "ab":
        queue.put(1, 1.0, 100, f"{name}1")
    queue.put(2, 1.0, 10, "a2")
    queue.put(2, 1.0, 10, "b2")
    assert queue.candidates(0, 8) == ["a1", "a2"]
    assert queue.pop() == "a1"
    assert queue.candidates(99, 8) == ["a2"]
    assert queue.candidates(100, 8) == ["a2", "b1"]
    assert queue.candidates(100, 1) == ["a2"]
    assert queue.pop(1) == "b1"
    assert FairQueue[str](9).candidates(100, 8) == []


def test_a_new_tenant_starts_with_the_lowest_clock() -> None:
    queue: FairQueue[str] = FairQueue(9)
    for name in "abc":
        queue.put(1, 1.0, 100, f"{name}1")
        queue.put(2, 1.0, 100, f"{name}2")
    assert queue.pop(1) == "a2"
    assert queue.candidates(100, 8) == ["a1", "b2"]
    assert queue.pop(1) == "b2"  # ahead of the first tenant by 200
    queue.put(3, 1.0, 100, "a3")
    assert queue.candidates(0, 8) == ["a1", "a3"]
