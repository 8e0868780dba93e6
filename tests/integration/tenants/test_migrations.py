"""The migrations: they match the models, can be reversed, and take over databases from before their reset."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ProjectState
from django.db.migrations.writer import MigrationWriter

from billing.models import BudgetLeaseSum
from billing.pricing import prices, rating
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from millrace.apps.request_log.models import RequestRecord
from tenants import actions, migration_reset
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import User
from tests.support.request_log.records import record
from tests.support.rows import allow_emptying, unscoped
from tools import reset_migrations

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "owner"])
APPS = list(migration_reset.LAST)
UPGRADE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "upgrade.md"


@pytest.fixture
def restored(as_owner: Any, transactional_db: None) -> Iterator[None]:
    yield
    call_command("migrate", verbosity=0)
    rating._rate_cards.clear()  # rate cards are numbered from 1 again
    with as_owner(), connection.cursor() as cursor:
        allow_emptying(cursor)


@pytest.fixture
def applied() -> Iterator[list[tuple[str, str]]]:
    """The applied migrations, which are applied again after the test."""
    rows = applied_migrations()
    yield rows
    replace_migrations(rows)


@pytest.fixture
def without_later_migrations(restored: None) -> Iterator[list[tuple[str, str]]]:
    """The applied migrations of a database without those after the reset, which are applied again after the test."""
    owner = connections["owner"]
    MigrationExecutor(owner).migrate([(app, migration_reset.REPLACEMENTS[-1]) for app in APPS])
    rows = applied_migrations()
    yield rows
    if not set(rows) <= set(applied_migrations()):  # the test failed before the takeover
        replace_migrations(rows)


def applied_migrations() -> list[tuple[str, str]]:
    with connections["owner"].cursor() as cursor:
        cursor.execute("SELECT app, name FROM django_migrations ORDER BY app, name")
        return list(cursor.fetchall())


def replace_migrations(rows: list[tuple[str, str]]) -> None:
    with connections["owner"].cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations")
        cursor.executemany("INSERT INTO django_migrations (app, name, applied) VALUES (%s, %s, now())", rows)


def before_the_reset(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the applied migrations of a database at the end of the earlier ones."""
    others = [row for row in rows if row[0] not in APPS]
    return sorted({*others, migration_reset.FIRST, ("billing", "0024_minor_units"), *migration_reset.LAST.items()})


def test_migrations_match_the_models() -> None:
    output = StringIO()
    call_command("makemigrations", "--check", "--dry-run", stdout=output)
    assert output.getvalue() == "No changes detected\n"


def test_a_reset_creates_every_model() -> None:
    """The migrations that tools/reset_migrations.py would write now."""
    models = ProjectState.from_apps(apps)
    state = ProjectState.from_apps(apps)
    for label, name in models.models:
        if label in APPS:
            state.remove_model(label, name)
    leaves = dict(MigrationLoader(None).graph.leaf_nodes())
    for label in reset_migrations.APPS:
        migration = reset_migrations.create_migration(label, leaves)
        compile(MigrationWriter(migration).as_string(), label, "exec")
        for operation in migration.operations:
            operation.state_forwards(label, state)
    assert MigrationAutodetector(state, models)._detect_changes() == {}
    assert set(reset_migrations.APPS) == set(APPS)


def test_migrations_can_be_reversed(restored: None) -> None:
    for app in reversed(APPS):
        call_command("migrate", app, "zero", verbosity=0)
    pattern = f"^({'|'.join(APPS)})_"
    with connection.cursor() as cursor:
        for query in (
            "SELECT relname FROM pg_class WHERE relname ~ %s",
            "SELECT proname FROM pg_proc WHERE proname ~ %s",
            "SELECT typname FROM pg_type WHERE typname ~ %s",
        ):
            cursor.execute(query, [pattern])
            assert cursor.fetchall() == [], query
        cursor.execute("SELECT defaclobjtype FROM pg_default_acl")
        assert cursor.fetchall() == []


def test_versions_of_the_sole_operator_become_those_of_the_earlier_release(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheduled and cancelled versions are discarded. The published one has no publisher."""
    sole = User.objects.create_superuser("sole@op.example")
    versions = []
    for model in ("published", "cancelled", "scheduled"):
        proposal = Proposal((NewPrice(model, Tier.STANDARD, Component.OUTPUT, 1),))
        made = prices.do_propose_prices(proposal, created_by=sole)
        versions.append(prices.do_publish_as_sole_operator(made, by=sole).pk)
        if model == "published":
            monkeypatch.setattr(prices, "_read_clock", lambda: datetime.now(UTC) + timedelta(hours=2))
            assert [row.pk for row in prices.do_start_scheduled_prices()] == versions
            monkeypatch.undo()
        if model == "cancelled":
            prices.do_cancel_prices(made, by=sole)
    call_command("migrate", "billing", "0015_stored_texts", verbosity=0)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT state, decided_by_id FROM billing_priceversion ORDER BY id")
        assert cursor.fetchall() == [("published", None), ("discarded", sole.pk), ("discarded", sole.pk)]


def test_sums_of_leases_become_leases_of_the_earlier_release(restored: None) -> None:
    """Its reconciler compares budget periods with leases only."""
    with all_tenants_scope(BypassReason.COMMAND):
        BudgetLeaseSum.objects.create(
            tenant_id=1,
            budget_period_ids=[5, 6],
            day=date(2026, 11, 3),
            lease_ids=[70, 71],
            fencing_tokens=[2, 1],
            settled_money=10**20,
            settled_tokens=8,
            settled_requests=3,
        )
    call_command("migrate", "billing", "0017_sole_operator", verbosity=0)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute(
            "SELECT id, tenant_id, budget_period_ids, settled_money, settled_tokens, settled_requests, open, created_at"
            " FROM billing_budgetlease"
        )
        created_at = datetime(2026, 11, 3, tzinfo=UTC)
        assert cursor.fetchall() == [(70, 1, [5, 6], 10**20, 8, 3, False, created_at)]
        cursor.execute("DELETE FROM billing_budgetlease")


def test_records_of_requests_are_partitioned_and_merged_without_a_loss(restored: None) -> None:
    """The indexes of the table become those of the partitioned one: none is built, and each has its definition."""
    tenant = actions.do_create_tenant("acme", "Acme")
    for number, at in enumerate((datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC))):
        record(tenant, number, started_at=at)

    def state() -> tuple[str, list[Any], int]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT relkind::text FROM pg_class WHERE relname = 'request_log_requestrecord'")
            kind = cursor.fetchone()[0]
            cursor.execute("SELECT count(*) FROM pg_indexes WHERE tablename = 'request_log_requestrecord'")
            indexes = cursor.fetchone()[0]
        rows = unscoped(RequestRecord).values_list("request_id", "started_at", "served_model", "limits")
        return kind, sorted(rows), indexes

    before = state()
    assert (before[0], len(before[1]), before[2]) == ("p", 2, 7)
    call_command("migrate", "request_log", "0002_sql", verbosity=0)
    assert state() == ("r", before[1], 9)
    call_command("migrate", verbosity=0)
    assert state() == before
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FILTER (WHERE indisvalid), count(*) FROM pg_index"
            " WHERE indrelid = 'request_log_requestrecord_before'::regclass"
        )
        assert cursor.fetchone() == (8, 8)  # those of the partitioned table, and the BRIN index


def test_a_database_at_the_end_of_the_earlier_migrations_is_taken_over(
    applied: list[tuple[str, str]], without_later_migrations: list[tuple[str, str]]
) -> None:
    """The migrations of the reset are not run, and those after it are."""
    replace_migrations(before_the_reset(without_later_migrations))
    output = StringIO()
    call_command("migrate", stdout=output)
    run = {line.split()[1] for line in output.getvalue().splitlines() if line.startswith("  Applying ")}
    later = set(applied) - set(without_later_migrations)
    assert run == {f"{app}.{name}..." for app, name in later}
    assert applied_migrations() == applied


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ([("billing", "0025_invoice_run_failures")], "billing 0025_invoice_run_failures"),
        ([("alerts", "0001_initial"), ("tenants", "0017_tenant_jobs")], "alerts 0001_initial"),
        ([row for row in migration_reset.LAST.items() if row != migration_reset.FIRST], "alerts 0001_initial"),
    ],
)
def test_a_database_with_a_part_of_the_earlier_migrations_is_refused(
    applied: list[tuple[str, str]], missing: list[tuple[str, str]], named: str
) -> None:
    rows = [row for row in before_the_reset(applied) if row not in missing]
    replace_migrations(rows)
    with pytest.raises(CommandError) as error:
        call_command("migrate", verbosity=0)
    assert named in str(error.value)
    assert f"with commit {migration_reset.BRIDGE} first" in str(error.value)
    assert applied_migrations() == rows


def test_the_upgrade_guide_names_the_commit_before_the_reset() -> None:
    assert f"`{migration_reset.BRIDGE}`" in UPGRADE.read_text(encoding="utf-8")


def test_an_empty_database_is_migrated(applied: list[tuple[str, str]]) -> None:
    """`django_migrations` is missing, or has no rows of the apps, as before the first migration."""
    owner = connections["owner"]
    replace_migrations([row for row in applied if row[0] not in APPS])
    migration_reset.take_over(owner)
    assert applied_migrations() == [row for row in applied if row[0] not in APPS]
    with owner.cursor() as cursor:
        cursor.execute("ALTER TABLE django_migrations RENAME TO hidden")
        try:
            migration_reset.take_over(owner)
        finally:
            cursor.execute("ALTER TABLE hidden RENAME TO django_migrations")
