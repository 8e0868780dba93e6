"""Sums of usage by segment and by end user: equal to those of the events, whenever and in which order they arrive."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from billing.metering import end_users, rollups, usage
from billing.metering.end_users import build_end_users
from billing.metering.ingest import UsageMessage, settle
from billing.metering.segments import Dimension, sum_segments
from billing.metering.usage import NoEndUsers, UsageReport
from billing.models import EndUserRollup, RollupState
from inference_worker.contract.messages import ExecutionUsage, encode
from inference_worker.contract.request import TOKEN_CLASSES
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant, User
from tests.support.rows import only_project, unscoped

pytestmark = pytest.mark.django_db
NOON = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)
DAY = timedelta(days=1)
PEOPLE = ("", "", "ann", "bob", "Zoë", "名前" * 60)


@pytest.fixture(autouse=True)
def _no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollups, "MARGIN", timedelta(0))
    monkeypatch.setattr(end_users, "MARGIN", timedelta(0))


@pytest.fixture
def keys(acme: Tenant) -> dict[int, str]:
    """The keys of the tenant, with the ID of the member who created each; empty: none."""
    project = only_project(acme)
    owner = User.objects.create_user("maker@example.com")
    made = [
        actions.do_create_api_key(project, name, created_by=user)[0]
        for name, user in (("a", owner), ("b", owner), ("c", None))
    ]
    return {key.pk: str(key.created_by_id or "") for key in made}


def store(events: Sequence[ExecutionUsage]) -> None:
    settle([UsageMessage(f"{number}-0", encode(event)) for number, event in enumerate(events)])


def some_events(event: Callable[..., ExecutionUsage], acme: Tenant, keys: dict[int, str], seed: int) -> list[Any]:
    chance = random.Random(seed)
    return [
        event(
            at=NOON + timedelta(minutes=chance.randrange(-5000, 900)),
            tenant_id=chance.choice((acme.pk, acme.pk, acme.pk, acme.pk + 1)),
            key_id=chance.choice((*keys, 999)),
            project_id=chance.choice((5, 6)),
            model=chance.choice("ab"),
            end_user=chance.choice(PEOPLE),
            outcome=chance.choice(("completed", "completed", "cancelled", "failed")),
            uncached=chance.randrange(1000),
            output=chance.randrange(50, 100),
        )
        for _ in range(120)
    ]


def expected(
    events: Sequence[ExecutionUsage], tenant: Tenant, keys: dict[int, str], dimension: Dimension, amount: str
) -> Counter[tuple[str, Any]]:
    """Return the sums by segment and day, computed from the events alone."""
    found: Counter[tuple[str, Any]] = Counter()
    for event in events:
        context = event.billing_context
        if context.tenant_id != tenant.pk:
            continue
        names = {
            "model": context.model,
            "key": str(context.key_id),
            "project": str(context.project_id),
            "member": keys.get(context.key_id, ""),
            "end_user": context.end_user,
        }
        tokens = 0 if event.outcome == "failed" else sum(getattr(event.usage, name) for name in TOKEN_CLASSES)
        day = datetime.fromtimestamp(context.admitted_at / 10**6, UTC).date()
        found[names[dimension], day] += tokens if amount == "tokens" else 1
    return found


@pytest.mark.parametrize("seed", range(3))
def test_each_grouping_adds_up_to_the_events(event, acme, keys, seed):
    """Events arrive late, several times and out of order, and rollups are built between them."""
    events = some_events(event, acme, keys, seed)
    arrivals = events * 2
    chance = random.Random(seed)
    chance.shuffle(arrivals)
    for start in range(0, len(arrivals), 30):
        store(arrivals[start : start + 30])
        for build in chance.choice(((), (rollups.build,), (rollups.build, build_end_users), (build_end_users,))):
            build()
        seen = {execution.billing_context.request_id: execution for execution in arrivals[: start + 30]}.values()
        are_exact([*seen], acme, keys)
    rollups.build()
    build_end_users()
    are_exact(events, acme, keys)


def are_exact(events: Sequence[ExecutionUsage], acme: Tenant, keys: dict[int, str]) -> None:
    columns = {"tokens": TOKEN_CLASSES, "requests": ("completed", "cancelled", "failed")}
    question = UsageReport(acme.pk, start=NOON - 30 * DAY)
    with tenant_scope(acme):
        for dimension in ("model", "key", "project", "member", "end_user"):
            for amount, names in columns.items():
                whole = expected(events, acme, keys, dimension, amount)
                found = sum_segments(question, dimension, names)
                assert {place: value for place, value in found.amounts.items() if value} == +whole
                assert found.count == len({segment for segment, _day in whole})
                largest = sum_segments(question, dimension, names, largest=2)
                assert sum(largest.amounts.values()) == sum(whole.values())
                assert len({segment for segment, _day in largest.amounts} - {None}) == min(2, found.count)


def test_the_largest_segments_are_returned_and_those_chosen(event, acme, keys):
    sizes = {"a": 1, "b": 9, "c": 5, "d": 7}
    store([event(tenant_id=acme.pk, model=model, at=NOON, output=size) for model, size in sizes.items()])
    question = UsageReport(acme.pk, start=NOON - DAY)
    day = NOON.date()
    with tenant_scope(acme):
        found = sum_segments(question, "model", ("output",), largest=2)
        assert (found.amounts, found.count) == ({("b", day): 9, ("d", day): 7, (None, day): 6}, 4)
        found = sum_segments(question, "model", ("output",), chosen=("a", "none"))
        assert found.amounts == {("a", day): 1, (None, day): 21}
        without_keys = UsageReport(acme.pk, start=NOON - DAY, key_ids=())
        assert sum_segments(without_keys, "model", ("output",)).amounts == {}


def test_end_users_beyond_the_limit_of_a_key_and_day_are_one_row(event, acme, keys, monkeypatch):
    monkeypatch.setattr(end_users, "MAX_END_USERS", 2)
    first, second, *_rest = keys
    names = ("ann", "bob", "cleo", "")
    store([event(tenant_id=acme.pk, key_id=key, at=NOON, end_user=name) for key in (first, second) for name in names])
    more = [event(tenant_id=acme.pk, key_id=first, at=NOON, end_user="cleo", output=50) for _ in range(3)]
    rollups.build()
    build_end_users()
    assert rows_of(first) == {"", "ann", "bob", None}
    store(more)  # moves another end user below the limit
    build_end_users()
    assert rows_of(first) == {"", "ann", "cleo", None}
    assert rows_of(second) == {"", "ann", "bob", None}
    with tenant_scope(acme):
        rows = usage.sums(UsageReport(acme.pk, start=NOON - DAY), ("end_user",))
        total = usage.total(usage.sums(UsageReport(acme.pk, start=NOON - DAY)))
        segments = sum_segments(UsageReport(acme.pk, start=NOON - DAY), "end_user", ("output",))
    assert rows[-1]["end_user"] is None and [row["end_user"] for row in rows[:-1]] == ["", "ann", "bob", "cleo"]
    assert usage.total(rows) == total
    assert segments.count == 4
    assert sum(segments.amounts.values()) == total["output"] == 8 * 7 + 150


def rows_of(key: int) -> set[str | None]:
    return {row.end_user for row in unscoped(EndUserRollup).filter(key_id=key)}


def test_usage_before_the_first_run_has_no_end_users(event, acme, keys):
    """The days that the other rollups have are copied, because their events may be archived."""
    old = [event(tenant_id=acme.pk, at=NOON - number * DAY, output=number + 1) for number in range(3)]
    store(old)
    rollups.build()
    with all_tenants_scope(BypassReason.COMMAND):
        later = datetime.now(UTC) + 3 * DAY  # so that no day counts as settled recently
        RollupState.objects.update(settled_before=later)
    assert build_end_users() == 0
    rows = unscoped(EndUserRollup).exclude(key_id=0)
    assert {(row.end_user, row.output) for row in rows} == {("", 1), ("", 2), ("", 3)}


def test_nothing_is_built_before_the_other_rollups(event, acme):
    store([event(tenant_id=acme.pk, at=NOON, end_user="ann", output=5)])
    assert build_end_users() == 0
    with tenant_scope(acme):
        (row,) = usage.sums(UsageReport(acme.pk), ("end_user",))
    assert (row["end_user"], row["output"]) == ("ann", 5)


def test_equal_sums_are_not_written_again(event, acme, keys):
    store(some_events(event, acme, keys, 9))
    rollups.build()
    build_end_users()

    def versions() -> dict[int, str]:
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            cursor.execute("SELECT id, ctid::text FROM billing_enduserrollup")
            return dict(cursor.fetchall())

    before = versions()
    store([event(tenant_id=acme.pk, model="new", at=NOON, end_user="ann")])
    build_end_users()
    after = versions()
    assert {pk: after[pk] for pk in before} == before
    assert len(after) == len(before) + 2  # of the key, and of all keys


def test_a_filter_by_end_user_reads_the_same_sums(event, acme, keys):
    events = some_events(event, acme, keys, 11)
    store(events)
    rollups.build()
    build_end_users()
    of_ann = [each for each in events if each.billing_context.end_user == "ann"]
    question = UsageReport(acme.pk, start=NOON - 30 * DAY, end_user="ann")
    with tenant_scope(acme):
        found = sum_segments(question, "model", TOKEN_CLASSES)
        assert {place: value for place, value in found.amounts.items() if value} == +expected(
            of_ann, acme, keys, "model", "tokens"
        )
        partial = UsageReport(acme.pk, start=NOON - DAY - timedelta(hours=5), end=NOON, end_user="ann")
        start, end = (round(at.timestamp() * 10**6) for at in (partial.start, partial.end))
        inside = [each for each in of_ann if start <= each.billing_context.admitted_at < end]
        assert sum(sum_segments(partial, "key", TOKEN_CLASSES).amounts.values()) == sum(
            expected(inside, acme, keys, "key", "tokens").values()
        )


@pytest.mark.parametrize(
    ("groups", "bucket"), [(("end_user", "tier"), None), (("miss_reason", "end_user"), "day"), (("end_user",), "hour")]
)
def test_sums_that_end_users_do_not_have_are_rejected(acme, groups, bucket):
    with tenant_scope(acme), pytest.raises(NoEndUsers):
        usage.sums(UsageReport(acme.pk), groups, bucket)


def test_tenants_can_only_read_their_own_end_users(event, acme, keys):
    store([event(tenant_id=tenant, at=NOON, end_user="ann") for tenant in (acme.pk, acme.pk + 1)])
    rollups.build()
    build_end_users()
    with tenant_scope(acme), connection.cursor() as cursor:
        cursor.execute("SELECT DISTINCT tenant_id FROM billing_enduserrollup")
        assert cursor.fetchall() == [(acme.pk,)]
        cursor.execute("SELECT has_table_privilege('billing_enduserrollup', 'DELETE')")
        assert cursor.fetchone() == (False,)
