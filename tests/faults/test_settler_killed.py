"""A settler killed at any step: the next one with its name settles each execution once and keeps budgets exact."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis
from django.db import connection

from billing.metering.reconciler import reconcile
from billing.metering.settler import Settler
from billing.models import Adjustment, BudgetPeriod, DailyCost, EarlyRelease, UsageEvent, UsageQuarantine
from billing.reservations import reservations
from inference_worker.contract.messages import USAGE_STREAM, ExecutionUsage
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.billing.killed_settler import STEPS
from tests.support.billing.usage_events import make_event
from tests.support.gateway.budgets import COST, DOLLAR, RESERVED, check_invariants, settle_events
from tests.support.rows import unscoped

ROOT = Path(__file__).resolve().parents[2]
EXECUTIONS = 20


@dataclass
class Books:
    """A tenant's budgets, an active lease, and a reclaimed lease."""

    key: ApiKeySnapshot
    price: int
    alive: tuple[int, int]
    reclaimed: tuple[int, int]

    def execution(self, lease: tuple[int, int], **changes: Any) -> ExecutionUsage:
        given = {"uncached": 1000, "cache_read": 9000, "output": 500, "price_version": self.price}
        held = {"lease_id": lease[0], "fencing_token": lease[1], "reserved_nano": RESERVED, "reserved_tokens": 14_096}
        who = {"tenant_id": self.key.tenant_id, "project_id": self.key.project_id, "key_id": self.key.key_id}
        return make_event(**(given | held | who | changes))


@pytest.fixture
def books(table: None, key: ApiKeySnapshot, budget: Callable[..., int]) -> Books:
    for period in ("day", "month", "lifetime"):
        budget(period=period, name=period, amount=100 * DOLLAR)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        alive, dead = lease(cursor, key, timedelta(hours=1)), lease(cursor, key, timedelta(0))
        cursor.execute("SELECT max(id) FROM billing_compiledratecard")
        (price,) = cursor.fetchone()
    assert reservations.reclaim(datetime.now(UTC)) == 1
    return Books(key, price, alive, dead)


def lease(cursor: Any, key: ApiKeySnapshot, lasting: timedelta) -> tuple[int, int]:
    cursor.execute(
        "SELECT budget_period_id FROM billing_open_budget_periods(%s, %s, %s, now())",
        [key.tenant_id, key.project_id, key.key_id],
    )
    budget_periods = [found for (found,) in cursor.fetchall()]
    need = [RESERVED, 14_096, 1]
    cursor.execute(
        "SELECT lease_id, fencing_token FROM billing_lease_budget(%s, 'gw', %s::bigint[], %s::bigint[], %s::bigint[],"
        " %s::bigint[], %s, interval '0', NULL, NULL, NULL)",
        [key.tenant_id, budget_periods, need, need, [64 * each for each in need], lasting],
    )
    found: tuple[int, int] = cursor.fetchone()
    return found


def release(executions: Sequence[ExecutionUsage]) -> int:
    """Release the unused parts of these executions early; return the number of releases that are not settled."""
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        for execution in executions:
            billing_context = execution.billing_context
            nano = COST, execution.usage.prompt + execution.usage.output
            at = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=billing_context.admitted_at)
            unused = [RESERVED - nano[0]], [(billing_context.reserved_tokens or 0) - nano[1]], [nano[0]], [nano[1]]
            cursor.execute(
                """SELECT billing_release_unused(%s::bigint[], %s::integer[], %s::timestamptz[], %s::text[],
                %s::smallint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])""",
                [
                    [billing_context.lease_id],
                    [billing_context.fencing_token],
                    [at],
                    [billing_context.request_id],
                    [billing_context.execution],
                    *unused,
                ],
            )
        return EarlyRelease.objects.count()


def die(step: str, time: int) -> int:
    """Run a settler that is killed at this step, and return its exit status."""
    parts = urlsplit(os.environ["MILLRACE_DATABASE_URL"])
    url = urlunsplit(parts._replace(path=f"/{connection.settings_dict['NAME']}"))
    command = [sys.executable, "-m", "tests.support.billing.killed_settler", step, str(time)]
    environ = os.environ | {"MILLRACE_DATABASE_URL": url, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=ROOT, env=environ, timeout=110).returncode


@pytest.mark.parametrize(
    ("step", "time"),
    [
        *((step, 1) for step in STEPS),
        pytest.param("moved", 2, marks=pytest.mark.extended),
        pytest.param("committed", 2, marks=pytest.mark.extended),
    ],
)
def test_a_settler_killed_at_any_step(
    books: Books, send: Any, settler_broker: redis.Redis, step: str, time: int
) -> None:
    known = [books.execution(books.alive) for _ in range(2)]
    settle_events(*known)
    executions = [books.execution(books.alive, usage_source="upstream") for _ in range(EXECUTIONS)]
    failed = books.execution(
        books.alive,
        outcome="failed",
        uncached=0,
        cache_read=0,
        output=0,
        request_id=known[0].billing_context.request_id,
        admitted_at=known[0].billing_context.admitted_at,
    )
    refused = [books.execution(books.alive, block_size=-1), books.execution(books.alive, output=5000), b"poison"]
    messages = [*executions, failed, *executions[:3], books.execution(books.reclaimed), *refused, known[1]]
    released = release([*executions[::3], known[0]])  # the last one is settled, so nothing is released
    assert released == len(executions[::3])
    send(*messages)
    assert die(step, time) == -signal.SIGKILL
    check_invariants()
    assert (settler_broker.xlen(USAGE_STREAM) == 0) == (step == "acknowledged")
    for _ in range(2):  # the next settler with its name; then once more, with all messages
        Settler(settler_broker, consumer="a", stopping=threading.Event()).drain()
        check_invariants()
        assert unscoped(UsageEvent).count() == EXECUTIONS + 3
        assert unscoped(UsageQuarantine).count() == len(refused)
        assert [each.outcome for each in unscoped(Adjustment).all()] == ["failed"]
        assert sum(each.executions for each in unscoped(DailyCost).all()) == EXECUTIONS
        assert {each.used for each in unscoped(BudgetPeriod).all()} == {(EXECUTIONS + 2) * COST * 10**6}
        assert settler_broker.xlen(USAGE_STREAM) == 0
        by_gateway = {each.request_id for each in unscoped(UsageEvent).all() if each.released_by == "gateway"}
        assert by_gateway == {execution.billing_context.request_id for execution in executions[::3]}
        assert release([]) == 0
        send(*messages, *known)
    assert {each.reserved for each in unscoped(BudgetPeriod).all()} == {(64 - EXECUTIONS - 2) * RESERVED}
    report = reconcile()
    assert (report.differences, report.quarantined, report.is_clean) == ([], len(refused), False)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("UPDATE billing_budgetlease SET reclaim_at = now()")
    reservations.reclaim(datetime.now(UTC))  # a quarantined event keeps no reservation
    assert {each.reserved for each in unscoped(BudgetPeriod).all()} == {0}
    check_invariants()
