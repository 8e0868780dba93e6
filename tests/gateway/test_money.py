"""Budgets under several gateways: never overrun, never refusing what fits. Numbers are the specification's."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connection
from psycopg.conninfo import make_conninfo

from billing.budgets import budget_leases, reservations
from billing.metering.ingest import SettleResult, UsageMessage, settle
from billing.metering.reconciler import reconcile
from billing.models import Adjustment, Budget, Correction, Window
from inference_worker.contract.messages import encode
from millrace.conf.environment import platform_settings
from millrace.gateway.admission import budget_admission
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import ApiError
from tenants import actions
from tenants.isolation import db_roles
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys.snapshot import ApiKeySnapshot
from tests.balance import assert_books_balance
from tests.billing.books import sheet
from tests.gateway.purse import Admitted, Meeting, Purse, admit_elsewhere, key_of, purse
from tests.seeing import Everybody, only_project

pytestmark = pytest.mark.django_db(transaction=True)
HOLD = 91_440_000  # nano-USD: 10,000 tokens of prompt and 4,096 of answer by list A
COST = 13_200_000  # 1,000 in, 9,000 read, 500 out
DOLLAR = 10**9
ROUNDS = [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


@pytest.fixture(autouse=True)
def table(transactional_db: None, as_owner: Any) -> Iterator[None]:
    yield
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE billing_usageevent DISABLE TRIGGER USER")
        cursor.execute("DELETE FROM billing_usageevent")
        cursor.execute("ALTER TABLE billing_usageevent ENABLE TRIGGER USER")


@pytest.fixture
def key() -> ApiKeySnapshot:
    """A key of a tenant, and a price list."""
    sheet()
    project = only_project(actions.do_create_tenant("acme", "Acme"))
    made, _ = actions.do_create_api_key(project, "k")
    return key_of(project.tenant_id, project.pk, made.pk)


@pytest.fixture
def url() -> str:
    return database_url()


def database_url() -> str:
    return make_conninfo(
        db_roles.as_role(platform_settings().database_url, db_roles.SYSTEM), dbname=connection.settings_dict["NAME"]
    )


@pytest.fixture
def budget(key: ApiKeySnapshot) -> Callable[..., int]:
    """Set a budget; its id. A dollar a month for the tenant, if nothing else is said."""

    def budget(**fields: Any) -> int:
        with all_tenants_scope(BypassReason.COMMAND):
            given = {"tenant_id": key.tenant_id, "name": "b", "unit": "money", "period": "month", "amount": DOLLAR}
            return Budget.objects.create(**(given | fields)).pk

    return budget


@pytest_asyncio.fixture
async def gateway(url: str, key: ApiKeySnapshot) -> AsyncIterator[Callable[..., Any]]:
    """Start a gateway's budget admission."""
    async with AsyncExitStack() as running:

        async def start(name: str = "gw-a", of: ApiKeySnapshot = key) -> Purse:
            return await running.enter_async_context(purse(url, of, name))

        yield start
    await sync_to_async(lambda: connection.close())()


def tell(*events: Any) -> SettleResult:
    """Settle events, or messages."""
    payloads = [each if isinstance(each, bytes) else encode(each) for each in events]
    return settle([UsageMessage(f"{place}-0", payload) for place, payload in enumerate(payloads, start=1)])


def window(budget_id: int) -> Window:
    (found,) = [each for each in Everybody(Window).all() if each.budget_id == budget_id]
    return found


def check_invariants() -> None:
    assert_books_balance(database_url())


def reap_all() -> int:
    """Let every lease have ended long ago."""
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("UPDATE billing_slice SET reap_at = now() - interval '1 hour' WHERE open")
    return reservations.reap(datetime.now(UTC))


see = sync_to_async(check_invariants)


async def test_worked_example_6_what_is_not_used_goes_back(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)()
    mine = await gateway()
    admitted = await mine.admit()
    assert admitted.grant.hold == HOLD
    held = (await sync_to_async(window)(made)).held
    assert held >= HOLD
    await see()
    await sync_to_async(tell)(admitted.event())
    after = await sync_to_async(window)(made)
    assert (after.used, held - after.held) == (COST * 10**6, HOLD)
    await see()


@pytest.mark.parametrize("rounds", ROUNDS)
def test_worked_example_7_exactly_ten_of_a_hundred_pass(
    key: ApiKeySnapshot, budget: Any, url: str, rounds: int
) -> None:
    """Three gateway processes, a hundred requests at once, several times, each with a budget of its own."""
    spawn = multiprocessing.get_context("spawn")
    counts = {"a": 34, "b": 33, "c": 33}
    with ProcessPoolExecutor(3, mp_context=spawn) as pool:
        for number in range(rounds):
            made = budget()
            meeting = Meeting(len(counts))
            named = {f"{name}{number}": count for name, count in counts.items()}
            runs = [pool.submit(admit_elsewhere, url, key, name, count, meeting) for name, count in named.items()]
            found = [each for run in runs for each in run.result()]
            events = [each for each in found if isinstance(each, bytes)]
            assert len(events) == 10
            assert {each for each in found if isinstance(each, str)} == {"budget_exceeded"}
            check_invariants()
            tell(*events)
            reap_all()  # what the dead gateways had not admitted
            after = window(made)
            assert (after.used, after.held) == (132_000_000 * 10**6, 0)
            check_invariants()
            with all_tenants_scope(BypassReason.COMMAND):
                Budget.objects.all_tenants().update(active=False)


async def take_up(mine: Purse, number: int) -> list[Admitted]:
    found = [await mine.admit() for _ in range(number)]
    assert all(isinstance(each, Admitted) for each in found), found
    return found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways wait longer for what they recall: a busy machine may be slower than what is promised."""
    monkeypatch.setattr(budget_admission, "REVOKE_LEASES_SECONDS", 10.0)


@pytest.mark.usefixtures("patient")
async def test_what_others_hold_and_have_not_admitted_is_recalled(gateway: Any, budget: Any) -> None:
    """Four gateways hold slices, and a request needs most of what is left."""
    made = await sync_to_async(budget)(amount=100 * DOLLAR)
    others = [await gateway(f"gw-{n}") for n in range(4)]
    admitted = [await other.admit() for other in others]
    assert (await sync_to_async(window)(made)).held > 4 * 50 * HOLD  # they hold far more than they admitted
    mine = await gateway("gw-mine")
    left = 100 * DOLLAR - 4 * HOLD
    huge = (left - 30_000_000) // 15_000  # tokens of output
    found = await mine.admit(max_tokens=huge)
    assert isinstance(found, Admitted), found
    await see()
    refused = await mine.admit(max_tokens=1000)
    assert isinstance(refused, ApiError)
    assert refused.code == "budget_exceeded"  # all of it is held by requests now
    assert (b"x-should-retry", b"false") in refused.headers()
    await sync_to_async(tell)(found.event(), *(each.event() for each in admitted))
    assert isinstance(await mine.admit(), Admitted)
    await see()


async def test_a_gateway_that_stopped_holds_its_slice_until_it_is_reaped(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_leases, "LEASE_SECONDS", 4.0)
    monkeypatch.setattr(budget_leases, "SETTLING_SECONDS", 0.0)
    await sync_to_async(budget)(amount=10 * DOLLAR)
    dead, mine = await gateway("gw-dead"), await gateway("gw-mine")
    await take_up(dead, 1)
    await deafen(dead)
    refused = await mine.admit(max_tokens=(10 * DOLLAR - HOLD - 30_000_000) // 15_000)
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.code) == (503, "server_is_overloaded")
    assert 1 <= refused.retry_after <= 6
    assert isinstance(await mine.admit_when_told(), Admitted)  # what fits beside it is not refused
    never = await mine.admit_when_told(max_tokens=10 * DOLLAR // 15_000)
    assert never.code == "budget_exceeded"  # it would not fit even then
    await asyncio.sleep(refused.retry_after + 0.2)
    await sync_to_async(reservations.reap)(datetime.now(UTC))
    found = await mine.admit_when_told(max_tokens=(10 * DOLLAR - 3 * HOLD) // 15_000)
    assert isinstance(found, Admitted), found
    await see()


async def deafen(stopped: Purse) -> None:
    """As good as stopped: it neither hears recalls nor returns anything."""
    await cancel_and_wait(stopped.budget_admission._tasks)


async def test_a_stopped_gateway_admits_nothing_from_a_lease_that_ended(
    gateway: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_leases, "LEASE_SECONDS", 4.0)
    await sync_to_async(budget)(amount=100 * DOLLAR)
    mine = await gateway()
    (first,) = await take_up(mine, 1)
    await deafen(mine)
    await asyncio.sleep(3.1)  # a second before its end the lease does not count any more
    (second,) = await take_up(mine, 1)
    assert second.grant.slice_id != first.grant.slice_id
    await see()


async def test_worked_example_8_a_shorter_answer_where_the_budget_says_so(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=50_000_000)
    mine = await gateway()
    refused = await mine.admit(max_tokens=4096)
    assert refused.code == "budget_exceeded"
    assert "$0.05 left" in str(refused)
    assert "resets at" in str(refused)
    assert (await mine.admit(prompt=16_667, max_tokens=None)).code == "budget_exceeded"  # not even the prompt
    with_less = await mine.admit(max_tokens=None)  # who asks for no length gets what is affordable
    assert with_less.grant.max_tokens == 1333
    await sync_to_async(tell)(with_less.event("failed", uncached=0))

    def clamp() -> None:
        with all_tenants_scope(BypassReason.COMMAND):
            Budget.objects.all_tenants().filter(pk=made).update(clamp=True)

    await sync_to_async(clamp)()
    mine.budget_admission.forget()
    assert (await mine.admit(max_tokens=4096)).grant.max_tokens == 1333
    await see()


async def test_worked_example_9_the_gateway_dies_before_dispatch(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=HOLD)
    mine = await gateway()
    (lost,) = await take_up(mine, 1)
    assert (await sync_to_async(window)(made)).held == HOLD
    assert await sync_to_async(reservations.reap)(datetime.now(UTC)) == 0  # its lease runs
    assert await sync_to_async(reap_all)() == 1
    assert (await sync_to_async(window)(made)).held == 0
    await see()
    (next_,) = await take_up(mine, 1)
    late = lost.event()
    for _ in range(2):  # it ran after all, and is told twice: there is no room, so nobody pays for it
        await sync_to_async(tell)(late)
        after = await sync_to_async(window)(made)
        assert (after.used, after.held) == (0, HOLD)
        (adjustment,) = await sync_to_async(Everybody(Adjustment).all)()
        assert (adjustment.verdict, adjustment.cost_femto) == ("late", -COST * 10**6)
    await sync_to_async(tell)(next_.event(), next_.event())
    after = await sync_to_async(window)(made)
    assert (after.used, after.held) == (COST * 10**6, 0)
    await see()


async def test_what_comes_late_and_still_fits_is_paid(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)()
    mine = await gateway()
    (admitted,) = await take_up(mine, 1)
    await sync_to_async(reap_all)()
    for _ in range(2):
        await sync_to_async(tell)(admitted.event())
        after = await sync_to_async(window)(made)
        assert (after.used, after.held) == (COST * 10**6, 0)
    await see()


@pytest.mark.parametrize("order", [("completed", "failed"), ("failed", "completed"), ("completed", "failed", "failed")])
async def test_what_the_caller_was_told_has_failed_costs_nothing(gateway: Any, budget: Any, order: tuple[str]) -> None:
    made = await sync_to_async(budget)()
    quota = await sync_to_async(budget)(name="quota", unit="tokens", amount=10**6)
    mine = await gateway()
    (admitted,) = await take_up(mine, 1)
    for verdict in order:
        outcome = await sync_to_async(tell)(
            admitted.event(verdict) if verdict != "failed" else admitted.event(verdict, uncached=700)
        )
        assert outcome.quarantined == 0
    after = await sync_to_async(window)(made)
    assert after.used == 0
    assert (await sync_to_async(window)(quota)).used == 0
    await see()


async def test_all_windows_or_none(gateway: Any, budget: Any, key: ApiKeySnapshot) -> None:
    wide = await sync_to_async(budget)(name="wide")
    narrow = await sync_to_async(budget)(name="narrow", unit="tokens", period="day", amount=14_000, key_id=key.key_id)
    calls = await sync_to_async(budget)(
        name="calls", unit="requests", period="lifetime", amount=3, project_id=key.project_id
    )
    mine = await gateway()
    refused = await mine.admit()
    assert (refused.code, refused.type) == ("quota_exceeded", "insufficient_quota")
    assert "'narrow'" in str(refused)
    assert "14000 tokens left" in str(refused)
    held = [(await sync_to_async(window)(each)).held for each in (wide, narrow, calls)]
    assert held == [0, 0, 0]
    admitted = await mine.admit(max_tokens=3000)
    held = [(await sync_to_async(window)(each)).held for each in (wide, narrow, calls)]
    assert held == [75_000_000, 13_000, 1]
    await sync_to_async(tell)(admitted.event())
    used = [(await sync_to_async(window)(each)).used for each in (wide, narrow, calls)]
    assert used == [COST * 10**6, 10_500 * 10**6, 10**6]
    await see()


async def test_soft_and_dry_run_budgets_only_count(gateway: Any, budget: Any) -> None:
    soft = await sync_to_async(budget)(name="soft", mode="soft", amount=1)
    dry = await sync_to_async(budget)(name="dry", mode="dry_run", amount=2 * HOLD)
    calls = await sync_to_async(budget)(name="calls", unit="requests", mode="dry_run", amount=4)
    mine = await gateway()
    admitted = await take_up(mine, 5)
    assert (await sync_to_async(window)(dry)).refused == 3
    assert (await sync_to_async(window)(calls)).refused == 1
    await sync_to_async(tell)(*(each.event() for each in admitted))
    for each in (soft, dry):
        after = await sync_to_async(window)(each)
        assert (after.used, after.held) == (5 * COST * 10**6, 0)
    await see()


async def test_a_new_period_is_a_new_row_and_takes_over_what_was_not_used(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(period="day", amount=2 * HOLD, rollover_cap=HOLD)
    mine = await gateway()
    (today,) = await take_up(mine, 1)
    midnight = (datetime.now(UTC) + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    tomorrow = int(midnight.timestamp()) * 1_000_000
    passed = [await mine.admit(at=tomorrow + number) for number in range(4)]
    assert [isinstance(each, Admitted) for each in passed] == [True] * 3 + [False]  # two, and one taken over
    first, second = sorted(
        (each for each in await sync_to_async(Everybody(Window).all)() if each.budget_id == made),
        key=lambda each: each.period_start,
    )
    assert (first.held, second.held, second.carried) == (HOLD, 3 * HOLD, HOLD)
    assert first.period_end == second.period_start == midnight
    await sync_to_async(tell)(today.event())
    await see()


async def test_a_model_without_a_price_is_refused(gateway: Any, key: ApiKeySnapshot) -> None:
    mine = await gateway()
    mine.budget_admission.prices = type(mine.budget_admission.prices)()
    refused = await mine.admit()
    assert (refused.status, refused.code) == (503, "model_not_priced")
    assert (b"x-should-retry", b"false") in refused.headers()


async def test_a_budget_set_later_counts_from_the_next_change_on(
    gateway: Any, budget: Any, key: ApiKeySnapshot
) -> None:
    mine = await gateway()
    (before,) = await take_up(mine, 1)
    assert before.grant.slice_id is None
    made = await sync_to_async(budget)(amount=HOLD)
    mine.budget_admission.forget()
    await take_up(mine, 1)
    assert (await mine.admit()).code == "budget_exceeded"
    await sync_to_async(tell)(before.event())
    assert (await sync_to_async(window)(made)).used == 0
    await see()


async def test_a_caller_who_leaves_while_a_slice_is_leased_leaves_nothing_held(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)(amount=2 * HOLD)
    mine = await gateway()
    await take_up(mine, 1)
    leaving = asyncio.create_task(mine.admit())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    await mine.all_is_back()
    assert (await sync_to_async(window)(made)).held == HOLD
    await take_up(mine, 1)
    await see()


async def test_the_reconciler_finds_what_a_hand_changed_and_says_so(gateway: Any, budget: Any) -> None:
    made = await sync_to_async(budget)()
    mine = await gateway()
    one, _ = await take_up(mine, 2)
    await sync_to_async(tell)(one.event())
    report = await sync_to_async(reconcile)()
    assert report.is_clean
    assert report.windows == 1

    def meddle() -> None:
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            cursor.execute("UPDATE billing_window SET held = held + 5, used = used - 7")

    before = await sync_to_async(window)(made)
    await sync_to_async(meddle)()
    with pytest.raises(AssertionError, match="invariant 2"):
        await sync_to_async(assert_books_balance)(database_url())
    report = await sync_to_async(reconcile)()
    assert (report.corrected, report.differences[0]["held"], report.differences[0]["used"]) == (1, -5, "7")
    after = await sync_to_async(window)(made)
    assert (after.held, after.used) == (before.held, before.used)
    (correction,) = await sync_to_async(Everybody(Correction).all)()
    assert (correction.held, correction.used) == (-5, 7)
    assert (await sync_to_async(reconcile)()).is_clean

    def meddle_with_slices(tokens: int, requests: int) -> None:
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            cursor.execute(
                """UPDATE billing_slice SET settled_tokens = settled_tokens + %s,
                settled_requests = settled_requests + %s WHERE id = %s""",
                [tokens, requests, one.grant.slice_id],
            )

    await sync_to_async(meddle_with_slices)(3, 1)
    (found,) = (await sync_to_async(reconcile)()).differences
    assert (found["slice"], found["used"], found["tokens"], found["requests"]) == (one.grant.slice_id, "0", -3, -1)
    await sync_to_async(meddle_with_slices)(-3, -1)
    assert (await sync_to_async(reconcile)()).is_clean
    await see()
