"""Archives: months of usage are moved to files and restored with equal rows, also after kills."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, connections

from billing.invoicing import checks
from billing.invoicing.drafts import do_draft
from billing.invoicing.runs import invoice_months
from billing.metering import archive_actions as verbs
from billing.metering import archives, rollups
from billing.metering.archive_actions import do_archive, do_restore
from billing.metering.archives import ArchiveDamagedError, manifest_path
from billing.metering.ingest import UsageMessage, settle
from billing.metering.partitions import existing_partitions
from billing.metering.usage import UsageReport, sums
from billing.models import BudgetLease, Invoice, UsageArchive, UsageEvent, UsageQuarantine
from inference_worker.contract.messages import encode
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant
from tests.support.billing.books import OCTOBER, period, price, take_back, use
from tests.support.rows import unscoped

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "owner"]),
    pytest.mark.acme('Acme "and" Söhne', months=True),
]
MONTH = date(2026, 10, 1)
NAME = "billing_usageevent_2026_10"
LATER = datetime(2026, 12, 20, tzinfo=UTC)


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return LATER


@pytest.fixture
def acme(acme: Tenant, table: None, as_owner: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tenant]:
    """The tenant with an invoice of October, two months ago. Its usage is in the hourly rollups."""
    alpha = price("3")
    use(acme, OCTOBER, (alpha, 1_000_001), times=3)
    use(acme, OCTOBER + timedelta(microseconds=1), (alpha, 7))
    take_back(unscoped(UsageEvent).get(uncached=7), OCTOBER)
    invoice_months(month="2026-10", now=datetime(2026, 11, 2, tzinfo=UTC))
    monkeypatch.setattr(verbs, "datetime", _Clock)
    monkeypatch.setattr(rollups, "OVERLAP", timedelta(minutes=-1))  # usage settled now counts as old
    monkeypatch.setattr(rollups, "MARGIN", timedelta(0))
    rollups.build()
    yield acme
    connections["owner"].close()
    with as_owner(), connection.cursor() as cursor:
        if NAME not in existing_partitions():
            cursor.execute(f"DROP TABLE IF EXISTS {NAME}")
        cursor.execute("DELETE FROM billing_usagearchive")


def rows() -> list[tuple[Any, ...]]:
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute(
            "SELECT e::text, tableoid::regclass::text FROM billing_usageevent e ORDER BY admitted_at, request_id"
        )
        return cursor.fetchall()


def state() -> str:
    if NAME in existing_partitions():
        return "attached"
    row = UsageArchive.objects.get()
    return "detached" if row.dropped_at is None else "dropped"


@pytest.mark.parametrize("drop", [False, True])
def test_a_month_is_archived_and_restored(acme: Tenant, tmp_path: Path, drop: bool) -> None:
    before, (invoice,) = rows(), unscoped(Invoice).all()
    with tenant_scope(acme):
        counted = sums(UsageReport(acme.pk, OCTOBER.replace(day=1, hour=0), LATER))
    manifest = do_archive(MONTH, tmp_path, drop=drop)
    assert (manifest.usage.rows, manifest.adjustments.rows) == (4, 1)
    assert manifest.usage.sums["uncached"] == "3000010"
    assert manifest.usage.sums["cost_femto"] == str(3_000_010 * 3 * 10**9)
    assert manifest.adjustments.sums["uncached"] == "-7"
    assert state() == ("dropped" if drop else "detached")
    assert rows() == []
    with tenant_scope(acme):  # usage pages still have its totals
        assert sums(UsageReport(acme.pk, OCTOBER.replace(day=1, hour=0), LATER)) == counted
    with pytest.raises(Conflict, match=r"2026-10 is archived"), all_tenants_scope(BypassReason.BILLING):
        checks.check(Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get(pk=invoice.pk))
    with pytest.raises(Conflict, match="archived"):
        do_draft(period(OCTOBER))
    assert invoice_months(month="2026-10", now=LATER).left
    do_restore(manifest_path(tmp_path, MONTH))
    assert (rows(), state()) == (before, "attached")
    with all_tenants_scope(BypassReason.BILLING):
        found = checks.check(Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get())
    assert found.same_data
    assert found.same_pdf
    with tenant_scope(acme):
        assert sums(UsageReport(acme.pk, OCTOBER.replace(day=1, hour=0), LATER)) == counted


def test_an_archive_of_a_release_without_searches_is_restored(
    acme: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, columns_of = rows(), archives._columns
    with monkeypatch.context() as patch:
        patch.setattr(archives, "_columns", lambda model: [name for name in columns_of(model) if name != "searches"])
        patch.setattr(archives, "SUMS", tuple(name for name in archives.SUMS if name != "searches"))
        manifest = do_archive(MONTH, tmp_path, drop=True)
    assert "searches" not in {*manifest.usage.columns, *manifest.usage.sums}
    do_restore(manifest_path(tmp_path, MONTH))
    assert rows() == before


def test_a_restored_month_is_protected_as_before(acme: Tenant, tmp_path: Path, as_owner: Any) -> None:
    do_archive(MONTH, tmp_path, drop=True)
    do_restore(manifest_path(tmp_path, MONTH))
    with tenant_scope(acme.pk + 1), connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM billing_usageevent_2026_10")
        assert cursor.fetchone() == (0,)
    for statement in ("DELETE FROM {}", "TRUNCATE {}", "UPDATE {} SET output = 1"):
        with pytest.raises(DatabaseError, match="permission denied"), all_tenants_scope(BypassReason.COMMAND):
            connection.cursor().execute(statement.format(NAME))
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("SELECT relrowsecurity, relforcerowsecurity FROM pg_class WHERE relname = %s", [NAME])
        assert cursor.fetchone() == (True, True)
        cursor.execute("SELECT count(*) FROM pg_trigger WHERE tgrelid = %s::regclass", [NAME])
        assert cursor.fetchone() == (2,)


def test_equal_rows_give_equal_bytes(acme: Tenant, tmp_path: Path) -> None:
    first, second = do_archive(MONTH, tmp_path / "a"), None
    do_restore(manifest_path(tmp_path / "a", MONTH))
    second = do_archive(MONTH, tmp_path / "b")
    assert first == second
    for name in ("usage-2026-10.json", first.usage.file, first.adjustments.file):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("at", ["_write_part", "manifest_path", "sum_relation", "_detach", "_drop", "_archive_rows"])
def test_a_killed_archive_can_be_repeated(
    acme: Tenant, tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stops, the rows are in the database or complete in files, and the next run finishes."""
    before = rows()
    with monkeypatch.context() as patch:
        patch.setattr(verbs if hasattr(verbs, at) else archives, at, _killed)
        with pytest.raises(KeyboardInterrupt):
            do_archive(MONTH, tmp_path, drop=True)
    assert state() == ("detached" if at == "_drop" else "attached")
    assert (rows() == before) == (state() == "attached")
    do_archive(MONTH, tmp_path, drop=True)
    assert state() == "dropped"
    with monkeypatch.context() as patch:
        patch.setattr(verbs, "_archive_rows", _killed)
        with pytest.raises(KeyboardInterrupt):
            do_restore(manifest_path(tmp_path, MONTH))
    assert rows() == []
    do_restore(manifest_path(tmp_path, MONTH))
    assert rows() == before


def _killed(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def test_usage_that_arrives_meanwhile_stays(acme: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beta = price("3", model="beta")
    for name in ("_write_part", "sum_relation"):  # before the rows are compared with the files, and after
        step = getattr(archives, name)

        def then_late(*args: Any, step: Any = step) -> Any:
            done = step(*args)
            use(acme, OCTOBER, (beta, 5))
            return done

        with monkeypatch.context() as patch:
            patch.setattr(archives, name, then_late)
            with pytest.raises(Conflict, match="was settled meanwhile"):
                do_archive(MONTH, tmp_path)
        assert state() == "attached"
    assert (
        len(unscoped(UsageEvent).all()) == 4 + 2
    )  # usage that arrived while the files were written was restored with them


def test_a_month_that_can_still_change_is_rejected(
    acme: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Conflict, match="before the following month"):
        do_archive(date(2026, 11, 1), tmp_path)
    with pytest.raises(Conflict, match="no usage of 2026-08"):
        do_archive(date(2026, 8, 1), tmp_path)
    with all_tenants_scope(BypassReason.SETTLER):
        lease = BudgetLease.objects.create(
            **{
                "tenant_id": acme.pk,
                "gateway_id": "g",
                "budget_period_ids": [],
                "money": 1,
                "tokens": 1,
                "requests": 1,
            },
            **dict.fromkeys(("created_at", "leased_until", "reclaim_at"), OCTOBER),
            fully_reserved=True,
        )
    with pytest.raises(Conflict, match="1 reservations are open"):
        do_archive(MONTH, tmp_path)
    with all_tenants_scope(BypassReason.SETTLER):
        lease.delete()
    monkeypatch.setattr(rollups, "OVERLAP", timedelta(minutes=10))
    with pytest.raises(Conflict, match="hourly sums"):
        do_archive(MONTH, tmp_path)
    monkeypatch.setattr(rollups, "OVERLAP", timedelta(minutes=-1))
    use(acme, OCTOBER, (price("3", model="beta"), 5))  # late: on November's invoice, which does not exist yet
    rollups.build()
    with pytest.raises(Conflict, match=r"Not invoiced yet: 2026-1[12]"):
        do_archive(MONTH, tmp_path)
    assert state() == "attached"
    assert list(tmp_path.iterdir()) == []


def test_a_draft_keeps_its_usage(acme: Tenant, tmp_path: Path) -> None:
    with all_tenants_scope(BypassReason.BILLING):
        billed = Invoice.objects.all_tenants().get()
        kept = {name: getattr(billed, name) for name in ("tenant", "entity", "period", "seller", "buyer")}
        Invoice.objects.create(**kept, revision=2)
    with pytest.raises(Conflict, match="Finalize the invoice drafts of the month first: 1 are left"):
        do_archive(MONTH, tmp_path)


def test_damaged_files_are_detected(acme: Tenant, tmp_path: Path) -> None:
    manifest = do_archive(MONTH, tmp_path)
    path, file = manifest_path(tmp_path, MONTH), tmp_path / manifest.usage.file
    good = file.read_bytes()
    text = gzip.decompress(good)
    for bad in (
        good[:-9],
        b"",
        good[:200] + bytes([good[200] ^ 1]) + good[201:],
        gzip.compress(text.replace(b"acme", b"bcme") + b"x"),
    ):
        file.write_bytes(bad)
        with pytest.raises(ArchiveDamagedError):
            do_restore(path)
        with pytest.raises(ArchiveDamagedError):
            do_archive(MONTH, tmp_path, drop=True)
    file.write_bytes(gzip.compress(text.replace(b"alpha", b"alphb")))  # the rollups are unchanged
    content = json.loads(path.read_bytes())
    with pytest.raises(ArchiveDamagedError):
        do_restore(path)
    content["format"] = "other"
    path.write_text(json.dumps(content))
    with pytest.raises(ArchiveDamagedError, match="of the format 'other'"):
        do_restore(path)
    assert state() == "detached"


def test_an_arrival_for_an_archived_month_waits_in_quarantine(
    acme: Tenant, tmp_path: Path, event: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    do_archive(MONTH, tmp_path)
    outcome = settle([UsageMessage("1-0", encode(event(at=OCTOBER, tenant_id=acme.pk)))])
    assert (outcome.settled, outcome.quarantined) == (0, 1)
    assert _quarantined() == UsageQuarantine.Reason.UNPLACEABLE
    call_command("usage_partitions")
    content = capsys.readouterr().out
    assert "2026-10               4" in content
    assert "detached" in content
    assert "for want of their month: 1 messages" in content


def _quarantined() -> str:
    with all_tenants_scope(BypassReason.COMMAND):
        return UsageQuarantine.objects.get().reason


def test_the_command_archives_and_restores(acme: Tenant, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("usage_archive", "create", "2026-10", "--to", str(tmp_path))
    with pytest.raises(CommandError, match="already archived"):
        call_command("usage_archive", "create", "2026-10", "--to", str(tmp_path))
    call_command("usage_archive", "create", "2026-10", "--to", str(tmp_path), "--drop")
    call_command("usage_archive", "restore", str(tmp_path / "usage-2026-10.json"))
    with pytest.raises(CommandError, match="is in the database"):
        call_command("usage_archive", "restore", str(tmp_path / "usage-2026-10.json"))
    with pytest.raises(CommandError, match="no month"):
        call_command("usage_archive", "create", "2026-13", "--to", str(tmp_path))
    assert "4 events are in the database again" in capsys.readouterr().out


def test_a_second_concurrent_archive_is_rejected(acme: Tenant, tmp_path: Path, as_owner: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [verbs._LOCK])
        try:
            with pytest.raises(Conflict, match="Another"):
                do_archive(MONTH, tmp_path)
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [verbs._LOCK])


def test_the_platforms_role_cannot_write_archived_months(acme: Tenant) -> None:
    row = {"month": MONTH, "rows": 1, "sha256": "", "periods": [], "detached_at": LATER}
    with pytest.raises(DatabaseError, match="permission denied"), all_tenants_scope(BypassReason.COMMAND):
        UsageArchive.objects.create(**row)
