"""The operator's cost of each execution is booked once, whatever the tenant pays for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connections

from billing.metering.settler import Settler
from billing.models import Adjustment, DailyCost, ExecutionCost, UsageEvent
from inference_worker.contract.messages import ExecutionUsage
from tests.support.billing.books import dollars, rate_card
from tests.support.billing.execution_costs import FULL, PAID, PRICE, cost_card, settle_all
from tests.support.billing.settlers import quarantined
from tests.support.rows import unscoped


@pytest.fixture
def upstream(table: None, event: Callable[..., ExecutionUsage]) -> Callable[..., ExecutionUsage]:
    version, at = rate_card(), datetime.now(UTC)
    cost_card()

    def make(**changes: Any) -> ExecutionUsage:
        given = {"at": at, "usage_source": "upstream", "price_version": version, "credential": 7, **FULL}
        return event(**(given | changes))

    return make


def revenue() -> int:
    return sum(int(row.cost_femto) for table in (UsageEvent, Adjustment) for row in unscoped(table).all())


def assert_daily_sums() -> None:
    """The daily sums equal the sums of the executions."""
    costs, days = unscoped(ExecutionCost).all(), unscoped(DailyCost).all()
    for name in ("cost_femto", "uncosted_tokens", "unbilled_femto"):
        assert sum(getattr(row, name) for row in days) == sum(getattr(row, name) for row in costs)
    assert sum(row.executions for row in days) == len(costs)
    assert sum(row.failed_femto for row in days) == sum(row.cost_femto for row in costs if row.outcome == "failed")


def test_completed_cancelled_and_failed_executions_have_costs(upstream: Callable[..., ExecutionUsage]) -> None:
    settle_all(
        upstream(request_id="a"),
        upstream(request_id="b", outcome="cancelled", usage_source="estimated", output=100),
        upstream(request_id="c", outcome="failed"),
        upstream(request_id="d", outcome="failed", uncached=0, output=0),
    )
    rows = {row.request_id: row for row in unscoped(ExecutionCost).all()}
    costs = {name: int(row.cost_femto) for name, row in rows.items()}
    assert costs == {"a": PAID, "b": PAID - 100 * dollars("5"), "c": PAID}
    assert revenue() == 2 * PRICE - 100 * dollars("15")
    assert [row.usage_source for row in unscoped(UsageEvent).order_by("request_id")] == [
        *("upstream", "estimated", "upstream", "upstream")
    ]
    (day,) = unscoped(DailyCost).all()
    assert (day.tenant_id, day.credential_id, day.executions, day.estimated) == (1, 7, 3, 1)
    assert day.day == rows["a"].admitted_at.date()
    assert day.failed_femto == PAID
    assert_daily_sums()


def test_usage_above_the_reservation_is_charged_up_to_it(upstream: Callable[..., ExecutionUsage]) -> None:
    reserved = (1000 * dollars("3") + 150 * dollars("15")) // 10**6
    settle_all(upstream(request_id="r", reserved_nano=reserved, reserved_tokens=1300))
    assert quarantined() == []
    event, cost = unscoped(UsageEvent).get(), unscoped(ExecutionCost).get()
    assert (event.uncached, event.output, event.unbilled_tokens) == (1000, 150, 50)
    assert (event.cost_femto, cost.cost_femto, cost.output) == (reserved * 10**6, PAID, 200)
    assert cost.unbilled_femto == PRICE - event.cost_femto == 50 * dollars("15")
    settle_all(upstream(request_id="r", reserved_nano=reserved, reserved_tokens=1300))
    assert quarantined() == []
    assert unscoped(Adjustment).count() == 0


def test_messages_in_any_order_book_one_cost(upstream: Callable[..., ExecutionUsage]) -> None:
    """A gateway reports a failure without tokens, and the worker what the upstream has counted."""
    lost = {"outcome": "failed", "uncached": 0, "output": 0, "usage_source": "engine", "credential": None}
    for number, late in enumerate(("completed", "failed", "cancelled")):
        for place in range(3):
            order = [{"outcome": late}, {"outcome": late}]
            order.insert(place, lost)
            for changes in order:
                settle_all(upstream(request_id=f"{number}-{place}", **changes))
            settle_all(*(upstream(request_id=f"{number}-{place}-batch", **changes) for changes in order))
    assert quarantined() == []
    assert revenue() == 0
    costs = unscoped(ExecutionCost).all()
    assert {int(row.cost_femto) for row in costs} == {PAID}
    assert len(costs) == unscoped(UsageEvent).count() == 3 * 3 * 2
    assert_daily_sums()


def test_executions_of_the_engine_have_a_cost_only_with_a_cost_card(
    upstream: Callable[..., ExecutionUsage], event: Callable[..., ExecutionUsage]
) -> None:
    settle_all(event(model="other"), upstream(usage_source="engine"), upstream(request_id="u", model="other"))
    rows = unscoped(ExecutionCost).order_by("-cost_femto")
    assert [(row.usage_source, int(row.cost_femto), row.uncosted_tokens) for row in rows] == [
        ("engine", PAID, 0),
        ("upstream", 0, 1200),
    ]


def test_classes_without_a_cost_are_counted(upstream: Callable[..., ExecutionUsage]) -> None:
    settle_all(upstream(cache_write_5m=30))
    row = unscoped(ExecutionCost).get()
    assert (row.cost_femto, row.uncosted_tokens, row.cost_card_id is None) == (PAID, 30, False)


def test_concurrent_settlers_book_each_execution_once(upstream: Callable[..., ExecutionUsage]) -> None:
    batches = [[upstream(request_id=f"r{number}") for number in range(60)] for _ in range(4)]

    def run(events: list[ExecutionUsage]) -> None:
        settle_all(*events)
        connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, batches))
    assert unscoped(ExecutionCost).count() == 60
    assert_daily_sums()


def test_a_crash_before_the_acknowledgement_books_nothing_twice(
    broker: Any, send: Callable[..., None], upstream: Callable[..., ExecutionUsage], monkeypatch: pytest.MonkeyPatch
) -> None:
    send(*(upstream(request_id=f"r{number}") for number in range(10)))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Settler, "_acknowledge", lambda *_: 1 / 0)
        Settler(broker, consumer="a", stopping=threading.Event()).drain()
    assert Settler(broker, consumer="a", stopping=threading.Event()).drain() == 10
    assert sum(row.executions for row in unscoped(DailyCost).all()) == 10
    assert_daily_sums()
