"""The reclaimer and the reconciler as separate processes, killed after each statement that changes data, and run
concurrently."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from asgiref.sync import sync_to_async
from django.db import connection

from billing.metering.reconciler import reconcile
from billing.models import BudgetCorrection, BudgetLease, BudgetPeriod, Reconciliation
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tests.support.gateway.budget_gateways import Admitted, budget_gateway
from tests.support.gateway.budgets import RESERVED, admit_requests, budget_period, check_invariants, see, settle_events
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]
ROOT = Path(__file__).resolve().parents[2]
# Dies after a statement that contains the words, before the commit; or at the end.
CHILD = """
import os, signal, sys
import django
django.setup()
from datetime import UTC, datetime
from django.db.backends.utils import CursorWrapper
from billing.reservations.reservations import reclaim
from billing.metering.reconciler import reconcile

job, words = sys.argv[1:]
real = CursorWrapper.execute

def execute(self, sql, params=None):
    found = real(self, sql, params)
    if words and words in sql:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

CursorWrapper.execute = execute
reclaim(datetime.now(UTC)) if job == "reclaim" else reconcile()
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(job: str, words: str = "") -> None:
    parts = urlsplit(os.environ["MILLRACE_DATABASE_URL"])
    environ = os.environ | {
        "MILLRACE_DATABASE_URL": urlunsplit(parts._replace(path=f"/{connection.settings_dict['NAME']}")),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "platform")]),
    }
    done = subprocess.run([sys.executable, "-c", CHILD, job, words], cwd=ROOT, env=environ, check=False)
    assert done.returncode == -signal.SIGKILL


def change(sql: str) -> None:
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute(sql)


@pytest.mark.parametrize(("words", "reclaimed"), [("billing_reclaim_leases", 0), ("", 1)])
async def test_a_killed_reclaimer_reclaims_a_lease_completely_or_not_at_all(
    gateway: Any, budget: Any, words: str, reclaimed: int
) -> None:
    """Worked example 9 of the specification, with a killed reclaimer."""
    made = await sync_to_async(budget)()
    (admitted,) = await admit_requests(await gateway(), 1)
    before = (await sync_to_async(budget_period)(made)).reserved
    await sync_to_async(change)("UPDATE billing_budgetlease SET reclaim_at = now() - interval '1 hour'")
    await sync_to_async(run)("reclaim", words)
    await see()
    assert (await sync_to_async(budget_period)(made)).reserved == (0 if reclaimed else before)
    await sync_to_async(run)("reclaim")
    await sync_to_async(run)("reclaim")
    assert (await sync_to_async(budget_period)(made)).reserved == 0
    (its,) = await sync_to_async(unscoped(BudgetLease).all)()
    assert its.fencing_token == (admitted.fencing_token or 0) + 1
    await see()


@pytest.mark.parametrize(
    "words",
    ["FOR NO KEY UPDATE", "billing_move_amounts", '"billing_budgetcorrection"', 'INSERT INTO "billing_recon', ""],
)
async def test_a_killed_reconciler_repairs_and_records_once(gateway: Any, budget: Any, words: str) -> None:
    """A repair and its row are written in one transaction."""
    made = await sync_to_async(budget)()
    one, _ = await admit_requests(await gateway(), 2)
    await sync_to_async(settle_events)(one.event())
    before = await sync_to_async(budget_period)(made)
    await sync_to_async(change)("UPDATE billing_budgetperiod SET reserved = reserved + 5, used = used - 7")
    await sync_to_async(run)("reconcile", words)
    now = await sync_to_async(budget_period)(made)
    corrections = await sync_to_async(unscoped(BudgetCorrection).all)()
    assert (now.reserved, now.used) == (
        before.reserved + 5 + sum(each.reserved for each in corrections),
        before.used - 7 + sum(each.used for each in corrections),
    )
    report = await sync_to_async(reconcile)()
    after = await sync_to_async(budget_period)(made)
    assert (after.reserved, after.used) == (before.reserved, before.used)
    (correction,) = await sync_to_async(unscoped(BudgetCorrection).all)()
    assert (correction.reserved, correction.used) == (-5, 7)
    assert report.is_clean == bool(corrections)
    await see()


def test_concurrent_reconcilers_reclaimers_and_settlers_find_no_errors(key: Any, budget: Any, url: str) -> None:
    """The reconciler reports no unfinished change of another process as an error."""
    made = budget(amount=1000 * RESERVED)

    async def admit() -> list[Admitted]:
        async with budget_gateway(url, key) as mine:
            found = [await mine.admit() for _ in range(120)]
            await mine.budget_admission.stop()
            return [request for request in found if isinstance(request, Admitted)]

    admitted = asyncio.run(admit())
    assert len(admitted) == 120

    def settle(start: int) -> None:
        for request in admitted[start::2]:
            settle_events(request.event())
        connection.close()

    def compare() -> None:
        for _ in range(15):
            assert not reconcile().differences
        connection.close()

    with ThreadPoolExecutor(4) as pool:
        for running in [pool.submit(settle, 0), pool.submit(settle, 1), pool.submit(compare), pool.submit(compare)]:
            running.result()
    assert not unscoped(BudgetCorrection).all()
    assert all(not row.differences for row in unscoped(Reconciliation).all())
    assert budget_period(made).reserved == 0
    assert len({row.budget_id for row in unscoped(BudgetPeriod).all()}) == 1
    check_invariants()
