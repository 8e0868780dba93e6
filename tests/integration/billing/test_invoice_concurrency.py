"""Concurrent invoicing: numbers without gaps, closing during settlement, and any order of events."""

from __future__ import annotations

import random
import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.core import mail
from django.db import connection

from billing.invoicing import checks, document, emails, pdf
from billing.invoicing.corrections import do_void
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.files import store_pdfs
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.lines import lines_of
from billing.invoicing.runs import invoice_months
from billing.ledger.credits import do_grant_credit
from billing.metering.ingest import UsageMessage, settle
from billing.models import (
    Account,
    BillingProfile,
    CreditGrant,
    Invoice,
    InvoiceFile,
    InvoiceLine,
    LedgerEntry,
    NumberSeries,
    Period,
    UsageEvent,
)
from billing.payments.recording import Received, do_record_payment
from billing.periods import default_entity, ensure_periods, month_bounds, stamps
from inference_worker.contract.messages import encode
from tenants.actions import do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import NOVEMBER, OCTOBER, make_months, over, pdf_of, period, price, use
from tests.support.billing.published_prices import A, publish
from tests.support.rows import unscoped
from tests.support.tenants.concurrency import run_in_threads

MILLION = 10**6


class Killed(Exception):
    """An error that simulates the end of a process."""


@pytest.fixture
def october(table) -> Period:
    make_months()
    return period(OCTOBER)


def drafts(month: Period, tenants: int) -> list[Invoice]:
    cheap = price("1")
    for number in range(tenants):
        use(do_create_tenant(f"t{number}", f"T{number}"), OCTOBER, (cheap, MILLION))
    do_close_period(month, now=over(month))
    return do_draft(month)


def test_numbers_have_no_gaps_under_rollbacks(october):
    """Worked example 12: 50 concurrent finalizations with 10 forced rollbacks give the numbers 1 to 40."""
    waiting = drafts(october, 50)
    random.shuffle(waiting)

    def finalize(invoice: Invoice, killed: bool) -> str:
        with all_tenants_scope(BypassReason.BILLING):
            done = do_finalize(invoice, now=october.ends_at)
            if killed:
                raise Killed
        return str(done)

    answers = run_in_threads([lambda row=row, n=n: finalize(row, n % 5 == 0) for n, row in enumerate(waiting)])
    assert sum(isinstance(answer, Killed) for answer in answers) == 10
    numbers = sorted(row.number for row in unscoped(Invoice).filter(number__isnull=False))
    assert numbers == [f"INV-2026-{number:06}" for number in range(1, 41)]
    assert unscoped(NumberSeries).get().last == 40
    report = invoice_months(month="2026-10", now=october.ends_at + timedelta(days=1))  # continues the rest
    assert sorted(report.finalized) == [f"INV-2026-{number:06}" for number in range(41, 51)]
    assert sum(entry.nano for entry in unscoped(LedgerEntry).all()) == 0


@pytest.mark.parametrize("step", ["_issue", "_fix", "_book", "credits.apply_credit", "document.describe_invoice"])
def test_a_killed_finalization_leaves_no_trace(october, monkeypatch, step):
    (draft,) = drafts(october, 1)

    def end(*args: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(f"billing.invoicing.finalizing.{step}", end)
        do_finalize(draft, now=october.ends_at)
    row = unscoped(Invoice).get()
    assert (row.state, row.number, unscoped(LedgerEntry).count()) == ("draft", None, 0)
    assert do_finalize(draft, now=october.ends_at).number == "INV-2026-000001"


def test_two_voids_at_once_issue_one_cancellation(october):
    (draft,) = drafts(october, 1)
    invoice = do_finalize(draft, now=october.ends_at)
    answers = run_in_threads([lambda: do_void(invoice, "Wrong address")] * 6)
    assert sorted(type(answer).__name__ for answer in answers) == ["Conflict"] * 5 + ["Invoice"]
    notes = unscoped(Invoice).filter(invoice_type="cancellation")
    assert [row.number[-6:] for row in notes] == ["000001"]
    assert [row.last for row in unscoped(NumberSeries).filter(prefix="CN")] == [1]
    assert sum(entry.nano for entry in unscoped(LedgerEntry).all()) == 0


@pytest.mark.parametrize(
    "step", ["finalizing._issue", "finalizing._book", "corrections._end", "corrections.emit_voided"]
)
def test_a_killed_void_leaves_no_trace(october, monkeypatch, step):
    (draft,) = drafts(october, 1)
    invoice = do_finalize(draft, now=october.ends_at)
    before = unscoped(LedgerEntry).count()

    def end(*args: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(f"billing.invoicing.{step}", end)
        do_void(invoice, "Wrong address")
    row = unscoped(Invoice).get()
    assert (row.state, unscoped(LedgerEntry).count()) == ("open", before)
    do_void(invoice, "Wrong address")
    assert unscoped(Invoice).get(invoice_type="cancellation").number.endswith("000001")


def test_one_tenants_error_does_not_delay_the_others(october, monkeypatch):
    waiting = drafts(october, 3)
    whole = document.describe_invoice

    def described(invoice: Invoice, lines: list[InvoiceLine]) -> dict[str, object]:
        if invoice.tenant_id == waiting[0].tenant_id:
            raise ValueError("no such line")
        return whole(invoice, lines)

    with monkeypatch.context() as patch:
        patch.setattr(document, "describe_invoice", described)
        report = invoice_months(month="2026-10", now=over(october))
    assert (report.finalized, report.left) == (*(["INV-2026-000001", "INV-2026-000002"], ["t0 2026-10: no such line"]),)
    assert invoice_months(now=october.ends_at + timedelta(days=1)).finalized == ["INV-2026-000003"]
    assert invoice_months(now=october.ends_at + timedelta(days=1)).finalized == []


def test_a_failing_typesetter_prevents_no_invoice(october, monkeypatch):
    """The invoice is final and can be paid. Its PDF is stored when the typesetter works, and is sent then."""
    drafts(october, 2)

    def fail(described: object) -> bytes:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(pdf, "render_pdf", fail)
        report = invoice_months(month="2026-10", now=over(october))
        assert (report.finalized, report.left) == (["INV-2026-000001", "INV-2026-000002"], [])
        assert emails.send_all() == 0
    first, second = unscoped(Invoice).order_by("number")
    assert (first.state, unscoped(InvoiceFile).count()) == ("open", 0)
    assert do_record_payment(Received("stripe", "pi_1", 100, OCTOBER, invoice=first.number))[1]
    made = pdf_of(first)
    assert store_pdfs() == 1
    assert store_pdfs() == 0
    assert made == pdf_of(first) == bytes(unscoped(InvoiceFile).get(invoice_id=first.pk).pdf)
    with all_tenants_scope(BypassReason.BILLING):
        rows = Invoice.objects.all_tenants().select_related("entity", "period", "refers_to")
        assert all(checks.check(row).same_pdf and checks.check(row).same_data for row in rows)
    assert second.number.encode() in pdf_of(second)


def test_a_pdf_that_is_typeset_concurrently_is_stored_once(october):
    drafts(october, 3)
    invoice_months(month="2026-10", now=over(october))  # the first typesetting of the process reads the fonts
    cheap = price("1", model="other")
    for tenant in unscoped(Tenant).all():
        use(tenant, NOVEMBER, (cheap, MILLION))
    do_close_period(period(NOVEMBER), now=over(period(NOVEMBER)))
    invoices = [do_finalize(draft) for draft in do_draft(period(NOVEMBER))]
    answers = run_in_threads([lambda row=row: pdf_of(row) for row in invoices for _ in range(4)] + [store_pdfs] * 4)
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    assert len({answer for answer in answers if isinstance(answer, bytes)}) == 3
    assert unscoped(InvoiceFile).count() == 6


def test_concurrent_billing_runs_of_a_month(october):
    cheap = price("1")
    for number in range(5):
        use(do_create_tenant(f"t{number}", f"T{number}"), OCTOBER, (cheap, MILLION))
    answers = run_in_threads([lambda: invoice_months(month="2026-10", now=over(october))] * 6)
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    invoices = unscoped(Invoice).all()
    assert sorted(row.number for row in invoices) == [f"INV-2026-{number:06}" for number in range(1, 6)]
    assert {row.total for row in invoices} == {100}
    assert unscoped(LedgerEntry).filter(account=Account.RECEIVABLE).__len__() == 5


def test_a_payment_reported_concurrently_is_booked_once(october):
    (draft,) = drafts(october, 1)
    invoice = do_finalize(draft)
    payment = Received("stripe", "pi_1", 100, OCTOBER, invoice=invoice.number)
    answers = run_in_threads([lambda: do_record_payment(payment)[1]] * 12)
    assert sorted(answers) == [False] * 11 + [True]
    assert unscoped(Invoice).get().state == "paid"


def test_an_email_is_claimed_by_one_sender(october):
    (draft,) = drafts(october, 1)
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.create(
            tenant=draft.tenant, entity=draft.entity, name="T", country="DE", emails=["bills@acme.example"]
        )
    do_finalize(draft)
    assert sum(run_in_threads([emails.send_all] * 6)) == 1
    assert len(mail.outbox) == 1


def test_credit_is_not_applied_twice(october):
    """Invoices of two months of one tenant are finalized concurrently with the same credit."""
    acme, cheap = do_create_tenant("acme", "Acme"), price("1")
    do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 150 * 10**7, starts_at=OCTOBER)
    waiting = []
    for at in (OCTOBER, NOVEMBER):
        use(acme, at, (cheap, MILLION))
        month = period(at)
        do_close_period(month, now=over(month))
        waiting += do_draft(month)
    totals = sorted(done.total for done in run_in_threads([lambda row=row: do_finalize(row) for row in waiting]))
    assert totals == [0, 50]


def test_closing_waits_for_events_with_the_periods_stamp(october):
    """The draft after the closing has every event with the period's stamp. Later events have the next stamp."""
    acme, cheap = do_create_tenant("acme", "Acme"), price("1")
    stamped, drafted = threading.Event(), threading.Event()

    def settle_slowly() -> None:
        def pause() -> None:
            stamped.set()
            drafted.wait(2)

        use(acme, OCTOBER, (cheap, MILLION), stamped=pause)

    def close() -> int:
        stamped.wait(20)
        do_close_period(october, now=over(october))
        drafts = do_draft(october)
        drafted.set()
        return sum(draft.events for draft in drafts)

    assert run_in_threads([settle_slowly, close], threads=2) == [None, 1]
    use(acme, OCTOBER, (cheap, MILLION))
    assert [row.invoice_period == october.pk for row in unscoped(UsageEvent).order_by("settled_at")] == [True, False]


def test_stamping_while_others_create_the_same_periods(october):
    def stamp() -> list[int]:
        with all_tenants_scope(BypassReason.SETTLER), connection.cursor() as cursor:
            return stamps(cursor, [(1, datetime(2027, month, 3, tzinfo=UTC)) for month in range(1, 13)])

    answers = run_in_threads([stamp] * 6)
    assert all(answer == answers[0] for answer in answers), answers
    assert len(set(answers[0])) == 12


@pytest.mark.parametrize("seed", range(3))
def test_any_order_and_any_duplication_give_the_same_invoice(table, event, seed):
    """Invariant 8, and worked example 12: 1,000 events delivered three times in random order are 1,000 rows."""
    version = publish(A, at=datetime.now(UTC) - timedelta(days=1))
    shuffle = random.Random(seed)
    at = datetime.now(UTC)
    usages = [
        {"uncached": shuffle.randrange(1, 9999), "cache_read": shuffle.randrange(99), "output": shuffle.randrange(99)}
        for _ in range(1000 if seed == 0 else 100)
    ]
    said = []
    for copies in (1, 3):
        tenant = do_create_tenant(f"copies-{copies}", "Acme")
        messages = [
            encode(event(tenant_id=tenant.pk, model="m", price_version=version, at=at, **usage)) for usage in usages
        ] * copies
        shuffle.shuffle(messages)
        for start in range(0, len(messages), 300):
            settle([UsageMessage(f"{n}-0", body) for n, body in enumerate(messages[start : start + 300])])
        assert len(unscoped(UsageEvent).filter(tenant_id=tenant.pk)) == len(usages)
        said.append(content_of(tenant, at))
    assert said[0] == said[1]


def content_of(tenant: Tenant, at: datetime) -> bytes:
    """Return the draft's content without its tenant."""
    (draft,) = do_draft(period(at), tenant)
    with all_tenants_scope(BypassReason.BILLING):
        return document.encode_document(document.describe_invoice(draft, lines_of(draft)))


# Months


@pytest.mark.parametrize(
    ("zone", "year", "month", "hours"),
    [
        ("UTC", 2026, 11, 720),
        ("America/New_York", 2026, 11, 721),
        ("America/New_York", 2026, 3, 743),
        ("Europe/Berlin", 2026, 10, 745),
        ("Europe/Berlin", 2026, 3, 743),
        ("UTC", 2028, 2, 696),
        ("UTC", 2026, 2, 672),
        ("Asia/Kolkata", 2026, 12, 744),
        ("Australia/Lord_Howe", 2026, 4, 720.5),
    ],
)
def test_months_in_a_time_zone(zone, year, month, hours):
    start, end = month_bounds(zone, year, month)
    assert (end - start) / timedelta(hours=1) == hours
    assert end == month_bounds(zone, year + month // 12, month % 12 + 1)[0]


@pytest.mark.django_db
def test_a_request_belongs_to_the_month_of_its_admission():
    with all_tenants_scope(BypassReason.SETTLER), connection.cursor() as cursor:
        entity = default_entity()
        ensure_periods(entity, datetime(2026, 9, 5, tzinfo=UTC), datetime(2026, 12, 5, tzinfo=UTC))
        end = datetime(2026, 11, 1, tzinfo=UTC)
        ids = stamps(cursor, [(1, end - timedelta(microseconds=1)), (1, end), (2, end)])
        labels = {row.pk: row.label for row in Period.objects.all()}
        assert [labels[pk] for pk in ids] == ["2026-10", "2026-11", "2026-11"]


@pytest.mark.django_db
def test_a_month_without_a_period_is_created_and_not_late():
    with all_tenants_scope(BypassReason.SETTLER), connection.cursor() as cursor:
        first = stamps(cursor, [(1, datetime(2026, 11, 3, tzinfo=UTC))])
        second = stamps(cursor, [(1, datetime(2026, 8, 3, tzinfo=UTC))])
        labels = {row.pk: row.label for row in Period.objects.all()}
        assert [labels[pk] for pk in (*first, *second)] == ["2026-11", "2026-08"]
