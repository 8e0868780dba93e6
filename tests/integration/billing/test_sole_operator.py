"""Publication of prices by the sole operator: who may do it, its hour, its cancellation, and what it never changes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import msgspec
import pytest
from django.db import DatabaseError, IntegrityError, connection
from rest_framework.test import APIClient

from billing.models import CompiledRateCard, Price, PriceVersion, UsageEvent
from billing.pricing import prices as price_actions
from billing.pricing.prices import (
    do_cancel_prices,
    do_discard_prices,
    do_price_unpriced,
    do_propose_prices,
    do_publish_as_sole_operator,
    do_publish_prices,
    do_revise_prices,
    do_start_scheduled_prices,
)
from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.pricing import Component, PriceIndex, Tier
from tenants.actions import do_deactivate_user, do_grant_operator, do_reactivate_user, do_revoke_operator
from tenants.actions.common import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, User
from tests.support.frontend.console import PASSWORD
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person, reauthenticated

pytestmark = pytest.mark.django_db
URL = "/api/operator/prices"
HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)
State = PriceVersion.State


class Clock:
    """The clock of prices, which a test moves. Each reading is a microsecond later."""

    def __init__(self) -> None:
        self._now = datetime.now(UTC)

    def now(self) -> datetime:
        self._now += timedelta(microseconds=1)
        return self._now

    def move(self, delay: timedelta) -> None:
        self._now += delay


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(price_actions, "_read_clock", found.now)
    return found


@pytest.fixture
def sole(db) -> User:
    return User.objects.create_superuser("sole@op.example", PASSWORD)


def make_prices(usd: str, model: str = "m") -> Proposal:
    return Proposal((NewPrice(model, Tier.STANDARD, Component.OUTPUT, nano_per_million(usd)),))


def draft(by: User | None, usd: str = "3", model: str = "m", **fields: Any) -> PriceVersion:
    return do_propose_prices(make_prices(usd, model), created_by=by, **fields)


def schedule(by: User, usd: str = "3", model: str = "m", **fields: Any) -> PriceVersion:
    return do_publish_as_sole_operator(draft(by, usd, model, **fields), by=by)


def find_card(at: datetime, model: str = "m") -> Any:
    index = PriceIndex()
    index.add(row.decode() for row in unscoped(CompiledRateCard).order_by("pk"))
    return index.find(1, model, Tier.STANDARD, round(at.timestamp() * 1e6))


def read_usd(at: datetime, model: str = "m") -> int | None:
    card = find_card(at, model)
    return None if card is None else card.rates[0].nano_per_million // 10**9


def state_of(version: PriceVersion) -> str:
    return unscoped(PriceVersion).get(pk=version.pk).state


def count_stored() -> tuple[int, int]:
    return unscoped(Price).count(), unscoped(CompiledRateCard).count()


def test_prices_take_effect_an_hour_later(sole, clock):
    do_publish_prices(draft(None, "2"), by=None)
    version = schedule(sole)
    assert (version.state, version.number, version.by_sole_operator) == (State.SCHEDULED, 2, True)
    assert version.effective_from == version.decided_at + HOUR
    assert count_stored() == (1, 1), "scheduled prices have neither rows nor rate cards"
    clock.move(HOUR - SECOND)
    assert do_start_scheduled_prices() == []
    clock.move(2 * SECOND)
    assert [row.pk for row in do_start_scheduled_prices()] == [version.pk]
    assert do_start_scheduled_prices() == []
    found = unscoped(PriceVersion).get(pk=version.pk)
    assert (found.state, found.decided_by_id) == (State.PUBLISHED, sole.pk)
    assert found.effective_from > version.effective_from, "never back in time"
    assert read_usd(found.effective_from - SECOND) == 2
    assert read_usd(found.effective_from) == 3
    with pytest.raises(Conflict, match="published"):
        do_cancel_prices(version, by=sole)
    actions = [row.action for row in unscoped(AuditEntry).filter(object_id=version.pk, object_type="priceversion")]
    assert sorted(actions) == ["price_version.created", "price_version.published", "price_version.scheduled"]


def test_a_later_effective_time_of_the_draft_is_kept(sole, clock):
    later = datetime.now(UTC) + 5 * HOUR
    assert schedule(sole, effective_from=later).effective_from == later
    soon = datetime.now(UTC) + HOUR / 2
    version = schedule(sole, model="n", effective_from=soon)
    assert version.effective_from == version.decided_at + HOUR
    with pytest.raises(Conflict, match="passed"):
        schedule(sole, model="o", effective_from=datetime.now(UTC) - HOUR)


def test_cancelled_prices_never_take_effect(sole, clock):
    do_publish_prices(draft(None, "2"), by=None)
    version = schedule(sole)
    second = User.objects.create_user("second@op.example", PASSWORD)
    do_grant_operator(second)
    cancelled = do_cancel_prices(version, by=second)
    assert (cancelled.state, cancelled.cancelled_by_id, cancelled.decided_by_id) == (
        *(State.CANCELLED, second.pk),
        sole.pk,
    )
    clock.move(3 * HOUR)
    assert do_start_scheduled_prices() == []
    assert read_usd(clock.now()) == 2
    for refused in (do_cancel_prices, do_publish_prices, do_discard_prices):
        with pytest.raises(Conflict, match="cancelled"):
            refused(version, by=second)
    with pytest.raises(Conflict, match="cancelled"):
        do_publish_as_sole_operator(version, by=sole)


def test_a_second_operator_changes_nothing_that_is_scheduled(sole, clock):
    version = schedule(sole)
    do_grant_operator(User.objects.create_user("second@op.example"))
    clock.move(HOUR + SECOND)
    assert [row.pk for row in do_start_scheduled_prices()] == [version.pk]


def test_only_the_sole_operator_may_publish_and_only_an_own_draft(sole):
    with pytest.raises(ActionRefused, match="did not write"):
        do_publish_as_sole_operator(draft(None), by=sole)
    user = User.objects.create_user("user@example.com")
    with pytest.raises(Conflict, match="no active operator"):
        schedule(user)
    second = User.objects.create_superuser("second@op.example")
    with pytest.raises(Conflict, match="Another operator must review"):
        schedule(sole)
    with pytest.raises(Conflict, match="Another operator must review"):
        schedule(second)
    assert count_stored() == (0, 0)


@pytest.mark.parametrize("end", [do_deactivate_user, do_revoke_operator])
def test_an_operator_who_was_removed_counts_for_a_week(sole, end):
    second = User.objects.create_superuser("second@op.example")
    end(second)
    with pytest.raises(Conflict, match=r"lost the right on .* you need no second"):
        schedule(sole)
    stale = User.objects.get(pk=second.pk)
    stale.operator_until = None
    stale.save()
    with pytest.raises(Conflict, match=r"lost the right on .* you need no second"):
        schedule(sole)
    assert User.objects.filter(pk=second.pk, operator_until__isnull=False).exists()
    User.objects.filter(pk=second.pk).update(operator_until=datetime.now(UTC) - timedelta(days=7, seconds=5))
    assert schedule(sole).state == State.SCHEDULED


def test_a_change_that_is_no_loss_of_the_right_does_not_count(sole):
    user = User.objects.create_user("user@example.com")
    do_deactivate_user(user)
    do_grant_operator(user)  # of a deactivated user
    assert schedule(sole).state == State.SCHEDULED
    do_reactivate_user(user)
    with pytest.raises(Conflict, match="Another operator must review"):
        schedule(sole, model="n")
    do_deactivate_user(user)
    with pytest.raises(Conflict, match=r"lost the right on .* you need no second"):
        schedule(sole, model="n")


def test_what_the_audit_log_has_counts_after_the_migration(sole):
    second = User.objects.create_superuser("second@op.example")
    do_revoke_operator(second)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL ROLE NONE")
        cursor.execute("ALTER TABLE tenants_user DISABLE TRIGGER tenants_user_operator_until")
        cursor.execute("UPDATE tenants_user SET operator_until = NULL")
        cursor.execute("SET LOCAL ROLE millrace_system")
        cursor.execute(import_module("tenants.migrations.0005_operator_until").FROM_AUDIT_LOG)
        cursor.execute("SET LOCAL ROLE NONE")
        cursor.execute("ALTER TABLE tenants_user ENABLE TRIGGER tenants_user_operator_until")
        cursor.execute("SET LOCAL ROLE millrace_app")
    with pytest.raises(Conflict, match=r"lost the right on .* you need no second"):
        schedule(sole)


def test_scheduled_prices_stand_in_the_way_of_others(sole, clock):
    later = do_publish_prices(draft(None, "9", "late", effective_from=datetime.now(UTC) + 3 * HOUR), by=None)
    assert later.number == 1
    with pytest.raises(Conflict, match="later effective date"):
        schedule(sole, model="late")
    version = schedule(sole)
    with pytest.raises(Conflict, match="m \\(standard\\) have not taken effect"):
        do_publish_prices(draft(None, "5"), by=None)
    with pytest.raises(Conflict, match="have not taken effect"):
        schedule(sole, "5")
    assert do_price_unpriced(make_prices("1"), "backfill") == [], "it is no model without prices"
    do_publish_prices(draft(None, "5", "other"), by=None)
    with pytest.raises(Conflict, match="scheduled"):
        do_revise_prices(version, make_prices("7"), by=sole)
    do_cancel_prices(version, by=None)
    do_publish_prices(draft(None, "5"), by=None)
    assert read_usd(datetime.now(UTC) + SECOND) == 5


@pytest.mark.parametrize(
    "change",
    [
        "state = 'published', effective_from = effective_from - interval '1 second'",
        "state = 'draft'",
        "body = '{}'",
        "effective_from = effective_from - interval '1 minute'",
        "decided_at = decided_at - interval '1 day'",
        "by_sole_operator = false",
    ],
)
def test_the_database_protects_scheduled_versions(sole, change):
    version = schedule(sole)
    statement = f"UPDATE billing_priceversion SET {change} WHERE id = %s"  # noqa: S608  (a literal of this file)
    with (
        pytest.raises(DatabaseError, match=r"rejected|sole_operator"),
        all_tenants_scope(BypassReason.COMMAND),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement, [version.pk])


@pytest.mark.parametrize("ended", ["scheduled", "cancelled"])
def test_the_database_stores_no_price_of_a_version_that_is_not_published(sole, ended):
    version = schedule(sole)
    if ended == "cancelled":
        do_cancel_prices(version, by=sole)
        with pytest.raises(DatabaseError, match="cancelled"), all_tenants_scope(BypassReason.COMMAND):
            PriceVersion.objects.filter(pk=version.pk).update(state="published")
    with pytest.raises(DatabaseError, match="not published"), all_tenants_scope(BypassReason.COMMAND):
        (price,) = make_prices("3").prices
        fields = msgspec.structs.asdict(price) | {"book": version.book, "effective_from": datetime.now(UTC)}
        Price.objects.create(version=version, **fields)
    assert count_stored() == (0, 0)


def test_the_database_requires_the_hour(sole):
    made = draft(sole)
    now = datetime.now(UTC)
    wrong = {"number": 1, "decided_at": now, "decided_by": sole, "by_sole_operator": True}
    for fields in (
        {"state": "scheduled", "effective_from": now + HOUR - SECOND},
        {"state": "published", "effective_from": now},
        {"state": "scheduled", "effective_from": now + HOUR, "by_sole_operator": False},
    ):
        with pytest.raises(IntegrityError, match="sole_operator"), all_tenants_scope(BypassReason.COMMAND):
            PriceVersion.objects.filter(pk=made.pk).update(**wrong | fields)


@pytest.mark.parametrize("seed", range(10))
def test_no_event_is_priced_by_a_cancelled_version(sole, clock, acme, use, seed):
    """In a random history, each event costs what was published and had taken effect when it was admitted."""
    rng = random.Random(seed)
    started: list[tuple[datetime, int]] = []  # when prices took effect, and the USD
    waiting: dict[int, tuple[PriceVersion, int]] = {}
    admitted: list[tuple[datetime, int | None, int | None]] = []

    def note_started() -> None:
        for version in do_start_scheduled_prices():
            started.append((version.effective_from, waiting.pop(version.pk)[1]))

    for usd in range(1, 40):
        clock.move(timedelta(minutes=rng.randrange(45)))
        step = rng.choice(["schedule", "schedule", "cancel", "publish", "admit", "admit", "start"])
        if step == "schedule" and not waiting:
            version = schedule(sole, str(usd))
            waiting[version.pk] = (version, usd)
        elif step == "cancel" and waiting:
            version, _ = waiting.pop(rng.choice(list(waiting)))
            do_cancel_prices(version, by=sole)
        elif step == "publish" and not waiting:
            started.append((do_publish_prices(draft(None, str(usd)), by=None).effective_from, usd))
        elif step == "start":
            note_started()
        elif step == "admit":
            if rng.random() < 0.7:
                note_started()
            at = clock.now()
            card = find_card(at)
            admitted.append((at, None if card is None else card.version, started[-1][1] if started else None))
    clock.move(3 * HOUR)
    do_start_scheduled_prices()
    for at, version, usd in admitted:  # settled after everything that came later
        if version is None:
            assert usd is None
            continue
        request = use(acme, model="m", output=1_000_000, at=at, price_version=version)
        event = unscoped(UsageEvent).get(request_id=request)
        assert int(event.cost_femto) == usd * 10**15
        priced = unscoped(Price).filter(pk__in=[pk for pk in event.price_ids if pk])
        versions = unscoped(PriceVersion).filter(pk__in={row.version_id for row in priced})
        assert {row.state for row in versions} == {State.PUBLISHED}
    cancelled = [row.pk for row in unscoped(PriceVersion).filter(state=State.CANCELLED)]
    assert not unscoped(Price).filter(version_id__in=cancelled)
    assert len(admitted) > 3


def run_concurrently(*actions: Callable[[], object]) -> list[str]:
    """Run the actions in threads. Return the name of the result's type of each: an error, or the model."""
    results: list[str] = [""] * len(actions)
    ready = threading.Barrier(len(actions))

    def run(place: int) -> None:
        ready.wait()
        try:
            results[place] = type(actions[place]()).__name__
        except (Conflict, ActionRefused) as exc:
            results[place] = type(exc).__name__
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.django_db(transaction=True)
def test_two_requests_schedule_once(sole):
    made, other = draft(sole), draft(sole, "4")
    actions = [lambda row=row: do_publish_as_sole_operator(row, by=sole) for row in (made, made, other, other)]
    assert sorted(run_concurrently(*actions)) == ["Conflict", "Conflict", "Conflict", "PriceVersion"]
    assert len(unscoped(PriceVersion).filter(state=State.SCHEDULED)) == 1


@pytest.mark.django_db(transaction=True)
def test_a_cancellation_and_the_start_exclude_each_other(sole, clock):
    for number in range(4):
        version = schedule(sole, model=f"m{number}")
        clock.move(HOUR + SECOND)
        cancelled, *_ = run_concurrently(
            lambda row=version: do_cancel_prices(row, by=None), do_start_scheduled_prices, do_start_scheduled_prices
        )
        state = state_of(version)
        assert state == (State.CANCELLED if cancelled == "PriceVersion" else State.PUBLISHED)
        assert len(unscoped(Price).filter(version=version)) == (state == State.PUBLISHED)


@pytest.mark.django_db(transaction=True)
def test_a_new_operator_and_a_publication_are_in_an_order(sole):
    """Either the publication was first, or there are two operators and it is refused."""
    for number in range(4):
        second = User.objects.create_user(f"second{number}@op.example")
        made = draft(sole, model=f"m{number}")
        published, _ = run_concurrently(
            lambda row=made: do_publish_as_sole_operator(row, by=sole), lambda user=second: do_grant_operator(user)
        )
        assert state_of(made) == (State.SCHEDULED if published == "PriceVersion" else State.DRAFT)
        with pytest.raises(Conflict, match="Another operator must review"):
            schedule(sole, model=f"n{number}")
        User.objects.filter(pk=second.pk).update(is_staff=False)
        User.objects.filter(pk=second.pk).update(operator_until=datetime.now(UTC) - timedelta(days=8))


def send(client: APIClient, version: PriceVersion, password: str = PASSWORD, **more: Any) -> Any:
    return client.post(f"{URL}/{version.pk}/publish-as-sole-operator", {"password": password, **more})


def test_the_api_needs_the_password(sole):
    client, version = by_person(sole), draft(sole)
    url = f"{URL}/{version.pk}/publish-as-sole-operator"
    assert client.post(url, {}).status_code == 400
    wrong = send(client, version, "wrong")
    assert (wrong.status_code, wrong.json()["errors"]) == (400, {"password": ["This is not your password."]})
    assert state_of(version) == State.DRAFT
    found = send(client, version).json()
    assert (found["state"], found["by_sole_operator"], found["decided_by"]) == ("scheduled", True, sole.email)
    assert send(client, version).status_code == 409
    cancelled = client.post(f"{URL}/{version.pk}/cancel").json()
    assert (cancelled["state"], cancelled["cancelled_by"]) == ("cancelled", sole.email)
    assert client.post(f"{URL}/{version.pk}/cancel").status_code == 409
    assert [row["id"] for row in client.get(URL, {"state": "cancelled"}).json()["results"]] == [version.pk]


def test_the_api_counts_wrong_passwords(sole):
    client, version = by_person(sole), draft(sole)
    statuses = [send(client, version, f"wrong {number}").status_code for number in range(12)]
    assert statuses[0] == 400
    assert statuses[-1] == 429
    assert send(client, version).status_code == 429, "a right password waits too"


def test_the_api_needs_the_second_factor_of_those_who_have_one(sole):
    from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret

    client, version = by_person(sole), draft(sole)
    TOTP.activate(sole, generate_totp_secret())
    assert send(client, version).status_code == 403
    assert state_of(version) == State.DRAFT
    device = sole.authenticator_set.get()
    reauthenticated(client, method="mfa", id=device.pk, type=device.type)
    assert send(client, version).status_code == 200


def test_the_api_refuses_a_second_operators_password(sole):
    second = User.objects.create_superuser("second@op.example", PASSWORD)
    version = draft(second)
    assert send(by_person(second), version).status_code == 409
    assert send(by_person(sole), version).status_code == 400, "another one's draft is published as usual"
