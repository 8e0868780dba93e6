"""Scheduling order of requests: by tenants' shares, service classes, expected length and age. The model and the clock
are fake."""

from __future__ import annotations

from collections import Counter

import pytest

from inference_worker.contract.request import RequestOutput, ServiceClass
from tests.support.engine.fakes import Clock, distinct, fake_engine, request, run, tokens_of

BATCH, FLEX, DEFAULT, PRIORITY = (
    ServiceClass.BATCH, ServiceClass.FLEX, ServiceClass.DEFAULT, ServiceClass.PRIORITY,
)  # fmt: skip


@pytest.mark.parametrize("blocks", [16, 400])  # the cache is full too, or only the batch
def test_one_request_is_not_delayed_by_another_tenants_two_hundred(blocks: int) -> None:
    engine, runner = fake_engine(blocks, max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(200):
        engine.add_request(request(f"a{number}", distinct(20, number), tenant="a", max_tokens=200))
    for _ in range(5):
        engine.step()
    assert engine.num_running == (5 if blocks == 16 else 8)
    engine.add_request(request("b", distinct(20, 999), tenant="b", max_tokens=50))
    got = [output for _ in range(2) for output in engine.step() if output.request_id == "b"]
    engine.check_integrity()
    assert tokens_of(got)
    outputs = [o for _ in range(60) for o in engine.step() if o.request_id == "b"]
    assert outputs[-1].finished  # and the next one does not preempt it
    assert all("b" in step for step in runner.steps[-60:][: len(outputs)])


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0, "c": 5.0}])
def test_long_term_shares_of_tenants_follow_their_weights(weights: dict[str, float]) -> None:
    engine, _ = fake_engine(300, max_num_seqs=8, max_num_batched_tokens=128)
    lengths = {"a": (40, 9), "b": (10, 30), "c": (90, 3)}  # prompt, output: different loads with equal cost
    number, served = 0, Counter[str]()

    def refill() -> None:
        nonlocal number
        waiting = Counter(seq.request.tenant for seq in engine.scheduler.waiting)
        for tenant, weight in weights.items():
            while waiting[tenant] < 5:
                number += 1
                waiting[tenant] += 1
                prompt, answer = lengths[tenant]
                ids = [number % 1000, number // 1000, *range(10, 8 + prompt)]
                name = f"{tenant}{number}"
                engine.add_request(request(name, ids, tenant=tenant, weight=weight, max_tokens=answer))

    for _ in range(3000):
        refill()
        for output in engine.step():
            tenant = output.request_id[0]
            served[tenant] += 2 + (lengths[tenant][0] if output.usage else 0)
    total, parts = sum(served.values()), sum(weights.values())
    for tenant, weight in weights.items():
        assert served[tenant] / total == pytest.approx(weight / parts, rel=0.05)


def test_a_new_tenant_gets_no_credit_for_the_past() -> None:
    engine, _ = fake_engine(300, max_num_seqs=1)
    for number in range(40):
        engine.add_request(request(f"a{number}", distinct(20, number), tenant="a"))
    for _ in range(20):
        engine.step()
    for number in range(20):
        engine.add_request(request(f"b{number}", distinct(20, 500 + number), tenant="b"))
    order = [output.request_id[0] for _ in range(20) for output in engine.step()]
    assert Counter(order) == {"a": 10, "b": 10}


def test_priorities_order_only_the_tenants_own_requests() -> None:
    engine, runner = fake_engine(100, max_num_seqs=1)
    engine.add_request(request("b first", distinct(20, 1), tenant="b", arrival=1.0))
    engine.add_request(request("a late", distinct(20, 2), tenant="a", arrival=2.0, priority=9))
    engine.add_request(request("a soon", distinct(20, 3), tenant="a", arrival=3.0, priority=-9))
    run(engine)
    assert [next(iter(step)) for step in runner.steps] == ["b first", "a soon", "a late"]


def test_a_higher_class_goes_first_regardless_of_shares() -> None:
    engine, runner = fake_engine(100, max_num_seqs=1)
    for name, service_class in (("batch", BATCH), ("flex", FLEX), ("default", DEFAULT), ("priority", PRIORITY)):
        engine.add_request(request(name, distinct(20, len(name)), tenant=name[0], service_class=service_class))
    run(engine)
    assert [next(iter(step)) for step in runner.steps] == ["priority", "default", "flex", "batch"]


@pytest.mark.parametrize("blocks", [5, 100])
def test_a_waiting_higher_class_preempts_the_newest_of_the_lowest(blocks: int) -> None:
    engine, runner = fake_engine(blocks, max_num_seqs=2)
    engine.add_request(request("flex", distinct(20, 1), service_class=FLEX, max_tokens=9))
    engine.add_request(request("default", distinct(20, 2), max_tokens=9))
    engine.step()
    engine.add_request(request("priority", distinct(20, 3), service_class=PRIORITY, max_tokens=3))
    engine.step()
    assert runner.steps[-1] == {"default": 1, "priority": 20}
    outputs = run(engine)
    assert tokens_of(outputs["flex"])[-1] == 108  # and it continued from its position
    assert outputs["flex"][-1].usage is not None
    assert outputs["flex"][-1].usage.prompt == 20


def test_a_useless_preemption_is_avoided() -> None:
    engine, _ = fake_engine(10, max_num_seqs=4)
    engine.add_request(request("first", distinct(100, 1), service_class=PRIORITY, max_tokens=9))
    engine.add_request(request("flex", distinct(16, 2), service_class=FLEX, max_tokens=9))
    engine.step()
    engine.add_request(request("large", distinct(140, 3), tenant="b"))
    for _ in range(5):
        engine.step()
    assert engine.stats().preemptions == 0


def test_a_request_is_preempted_at_most_twice_for_other_tenants() -> None:
    engine, _ = fake_engine(100, max_num_seqs=2)
    engine.add_request(request("a1", distinct(20, 1), tenant="a", max_tokens=400))
    engine.add_request(request("a2", distinct(20, 2), tenant="a", max_tokens=400))
    for number in range(12):
        for _ in range(10):
            engine.step()
        engine.add_request(request(f"b{number}", distinct(20, 100 + number), tenant=f"b{number}", max_tokens=3))
    seen = [seq for seq in [*engine.scheduler.running, *engine.scheduler.waiting] if seq.request.tenant == "a"]
    assert max(seq.fairness_preemptions for seq in seen) == 2
    run(engine)


def test_batch_requests_use_idle_capacity_only() -> None:
    engine, runner = fake_engine(100, max_num_seqs=4, max_num_batched_tokens=48)
    for number in range(6):
        engine.add_request(request(f"batch{number}", distinct(30, number), service_class=BATCH, max_tokens=40))
    for _ in range(4):
        engine.step()
    assert engine.num_running == 4
    for number in range(4):
        engine.add_request(request(f"now{number}", distinct(10, 50 + number), tenant="b", max_tokens=5))
    engine.step()
    # All four start immediately and preempt the four batch requests.
    assert {name: n for name, n in runner.steps[-1].items() if name.startswith("now")} == {
        f"now{i}": 10 for i in range(4)
    }
    for _ in range(4):
        engine.step()
        assert all(name.startswith("now") for name in runner.steps[-1])
    outputs = run(engine)
    assert all(len(tokens_of(outputs[f"batch{number}"])) >= 36 for number in range(6))


def test_batch_requests_get_no_tokens_that_others_can_use() -> None:
    engine, runner = fake_engine(100, max_num_seqs=4, max_num_batched_tokens=32)
    engine.add_request(request("batch", distinct(300, 1), service_class=BATCH))
    engine.step()
    engine.add_request(request("now", distinct(300, 2), tenant="b"))
    for _ in range(9):
        engine.step()
    assert [step.get("batch", 0) for step in runner.steps] == [32] + [0] * 9
    engine.step()
    assert runner.steps[-1] == {"now": 300 - 9 * 32, "batch": 32 - (300 - 9 * 32)}


def test_batch_requests_expire_and_do_not_age() -> None:
    clock = Clock()
    engine, runner = fake_engine(100, max_num_seqs=1, clock=clock)
    engine.add_request(request("long", distinct(20, 1), max_tokens=1000))
    engine.add_request(request("batch", distinct(20, 2), tenant="b", service_class=BATCH, expires_at=86_400.0))
    for hour in range(24):
        clock.now = hour * 3600.0
        assert [output.request_id for output in engine.step()] == ["long"]
    clock.now = 86_400.0
    [expired, _] = engine.step()
    assert expired.request_id == "batch"
    assert expired.error is not None
    assert expired.error.code == "request_expired"
    assert expired.usage is not None
    assert expired.usage.prompt == 0
    engine.check_integrity()
    assert all("batch" not in step for step in runner.steps)


def test_flex_requests_age_and_run() -> None:
    clock = Clock()
    engine, _ = fake_engine(100, max_num_seqs=1, clock=clock)
    engine.add_request(request("flex", distinct(20, 1), tenant="b", service_class=FLEX, arrival=0.0))
    ended: list[RequestOutput] = []
    for number in range(100):  # priority requests would always go first
        for part in range(2):
            mark = 2 * number + part
            engine.add_request(
                request(f"p{mark}", distinct(20, mark + 10), service_class=PRIORITY, tenant="a", arrival=clock.now)
            )
        clock.now += 1.0
        ended += engine.step()
        if any(output.request_id == "flex" for output in ended):
            break
    assert 39.0 <= clock.now <= 42.0  # two classes, twenty seconds each


def test_the_shortest_expected_request_of_a_tenant_goes_first() -> None:
    engine, runner = fake_engine(200, max_num_seqs=1)
    engine.add_request(request("long", distinct(20, 1), max_tokens=900))
    engine.add_request(request("short", distinct(20, 2), max_tokens=2))
    engine.add_request(request("other", distinct(20, 3), tenant="b", max_tokens=500))
    engine.step()
    assert list(runner.steps[0]) == ["short"]


def test_expected_lengths_are_learned_from_the_tenants_outputs() -> None:
    engine, runner = fake_engine(200, max_num_seqs=1, choose=lambda seq: 2 if seq.num_output_tokens == 3 else 100)
    for number in range(5):  # short prompts had outputs of four tokens, whatever their max_tokens
        engine.add_request(request(f"before{number}", distinct(20, number), max_tokens=1000))
    run(engine)
    engine.add_request(request("asks for few", distinct(20, 50), max_tokens=100))
    engine.add_request(request("has had few", distinct(21, 51), max_tokens=1000))
    engine.add_request(request("still fewer", distinct(22, 52), max_tokens=1))
    before = len(runner.steps)
    run(engine)
    order = list(dict.fromkeys(name for step in runner.steps[before:] for name in step))
    assert order == ["still fewer", "asks for few", "has had few"]


def test_short_requests_overtake_for_a_limited_time() -> None:
    clock = Clock()
    engine, runner = fake_engine(200, max_num_seqs=1, clock=clock)
    engine.add_request(request("long", distinct(20, 1), max_tokens=1000))  # expected: 256 tokens, at twice
    for number in range(40):
        clock.now = number * 0.05
        engine.add_request(request(f"short{number}", distinct(20, 10 + number), arrival=clock.now, max_tokens=1))
    run(engine)
    order = list(dict.fromkeys(name for step in runner.steps for name in step))
    assert order.index("long") == 6  # (512 - 2) / 2000 of a second equals five of them and the first


def test_requests_with_a_common_cached_prefix_run_together() -> None:
    engine, runner = fake_engine(12, max_num_seqs=1)
    engine.add_request(request("a1", distinct(64, 1)))
    engine.step()
    for name, mark, arrival in (("b1", 2, 0.010), ("b2", 2, 0.011), ("a2", 1, 0.020), ("a3", 1, 0.021)):
        engine.add_request(request(name, distinct(64, mark), arrival=arrival))
    run(engine)
    assert [next(iter(step)) for step in runner.steps] == ["a1", "a2", "a3", "b1", "b2"]


def test_no_request_waits_for_a_prefix_computed_by_a_lower_class() -> None:
    engine, runner = fake_engine(100, max_num_batched_tokens=64, max_num_seqs=4)
    engine.add_request(request("batch", distinct(200, 1), service_class=BATCH))
    engine.step()
    engine.add_request(request("same class", distinct(200, 1), service_class=BATCH))
    engine.add_request(request("now", distinct(200, 1)))
    engine.step()
    assert runner.steps[-1] == {"now": 64}  # in addition to the blocks cached by the first step
    outputs = run(engine)
    assert {name: output[-1].cached_tokens for name, output in outputs.items()} == {
        "batch": 0, "same class": 192, "now": 64,
    }  # fmt: skip


def test_short_prompts_overtake_long_ones_whose_number_is_limited() -> None:
    engine, runner = fake_engine(
        200, max_num_batched_tokens=64, long_prefill_token_threshold=16, max_long_partial_prefills=1
    )
    for number in range(3):
        engine.add_request(request(f"long{number}", distinct(200, number)))
    engine.add_request(request("short", distinct(10, 9), arrival=5.0))
    engine.step()
    assert runner.steps[0] == {"long0": 16, "short": 10}
    run(engine)


@pytest.mark.parametrize("locality_tokens", [0, 150])
def test_cached_prompts_go_first_within_a_bound_of_service(locality_tokens: int) -> None:
    """At each start, the tenant is ahead of the least served waiting tenant by at most `locality_tokens`."""
    engine, _ = fake_engine(60, max_num_seqs=1, max_num_batched_tokens=128, locality_tokens=locality_tokens)
    shared, started, number = list(range(48)), list[str](), 0
    ahead = 0.0
    for _ in range(400):
        waiting = Counter(seq.request.tenant for seq in engine.scheduler.waiting)
        for tenant in ("cached", "other"):
            while waiting[tenant] < 3:
                number += 1
                waiting[tenant] += 1
                prompt = [*shared, 500 + number % 400] if tenant == "cached" else distinct(49, number)
                engine.add_request(request(f"{tenant}{number}", prompt, tenant=tenant, max_tokens=2))
        served = {tenant.name: tenant.served for tenant in engine.scheduler.tenants.active() if tenant.num_waiting}
        before = {seq.request_id for seq in engine.scheduler.waiting}
        engine.step()
        new = [seq.request.tenant for seq in engine.scheduler.running if seq.request_id in before]
        if len(new) == 1:  # of several starts in one step, the later ones see new counters
            started += new
            ahead = max(ahead, served[new[0]] - min(served.values()))
    engine.check_integrity()
    assert ahead <= locality_tokens
    if locality_tokens:
        assert ahead > 0
        assert {"cached", "other"} == set(started)
    else:
        assert ahead == 0
    assert len(started) > 100
