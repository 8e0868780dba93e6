"""Histories of two tenants' bills, made by the product's actions and compared with the oracle.

A history is a list of steps: the name of a method of `MonthHistory` and its arguments. Three months can be invoiced.
`settle` invoices the rest and a fourth month, whose one-off line lets rounding be billed in either direction. Then the
documents have no carried rounding left, so their sum is the oracle's amount, rounded to the cent.
"""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from typing import Any

from django.db import connection, transaction

from billing.invoicing.corrections import do_issue_credit_note, do_issue_debit_note
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.lines import lines_of
from billing.invoicing.one_off_lines import do_add_one_off_line, do_end_one_off_line
from billing.invoicing.prepayment import available_nano
from billing.invoicing.preview import preview
from billing.invoicing.price_terms import do_add_price_term, do_end_price_term
from billing.invoicing.reratings import continue_reratings, do_apply_rerating, do_propose_rerating
from billing.ledger.credits import do_commit, do_end_commitment
from billing.metering.metered import do_record_metered_usage, do_reverse_metered_usage
from billing.models import (
    Adjustment,
    BillingProfile,
    Commitment,
    Invoice,
    InvoiceLine,
    MeteredUsage,
    OneOffLine,
    Period,
    Price,
    PriceTerm,
    UsageEvent,
)
from billing.pricing.prices import do_assign_book, do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from billing.rates.terms import TermRule, TermType, VolumeTier
from tenants.actions import Conflict, do_create_tenant, do_delete_tenant, do_restore_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import make_months, over, period, take_back, use
from tests.support.billing.deletions import at_time
from tests.support.billing.month_oracle import MINOR_UNITS, cost_of, owed_for, usage_cost

FIRST = 6  # June 2026
STARTS = tuple(datetime(2026, month, 1, tzinfo=UTC) for month in range(FIRST, FIRST + 5))
CHANGE = datetime(2026, FIRST + 1, 15, tzinfo=UTC)  # all prices change in the middle of the second month
DAYS = (4, 24)  # of usage
MODELS = ("alpha", "beta")
COMPONENTS = (Component.UNCACHED, Component.OUTPUT, Component.CACHE_STORAGE)
PRICES = ((3_337_000_001, 9_870_000_000, 4_500_000), (2_111_111_111, 12_345_678_901, 6_000_001))  # before, after
BOOKS = {"USD": "list", "EUR": "eur", "JPY": "jpy"}
TIERS = (VolumeTier(0, 0), VolumeTier(3_000_000, 2_345_678_901), VolumeTier(8_000_000, 1_111_111_111))
FIRST_OPEN = 3  # the month after those of usage
LAST_LINE = 10**6  # cents

Step = tuple[Any, ...]  # the name of a method of MonthHistory, and its arguments


class Undone(Exception):
    """The end of a history, whose transaction is rolled back."""


class Difference(AssertionError):
    """A difference between documents and the oracle, or between a preview and its document."""


def month_label(month: int) -> str:
    return f"{STARTS[min(month, 3)]:%Y-%m}"


def first_day(month: int, day: int) -> date | None:
    """Return a day of a month, the last one if there are fewer; without a day, none."""
    if not day:
        return None
    year, number = map(int, month_label(month).split("-"))
    return date(year, number, min(day, monthrange(year, number)[1]))


def create_tenants() -> dict[str, Tenant]:
    """Create the months, a tenant for each currency, and its price book. They are the same in all histories."""
    make_months(FIRST, FIRST + 3)
    tenants = {currency: do_create_tenant(f"in-{currency.lower()}", currency) for currency in BOOKS}
    for currency, book in BOOKS.items():
        versions = []
        for nanos, at in zip(PRICES, (datetime(2026, 1, 1, tzinfo=UTC), CHANGE), strict=True):
            prices = [
                NewPrice(model, Tier.STANDARD, component, nano * (100 if currency == "JPY" else 1))
                for model in MODELS
                for component, nano in zip(COMPONENTS, nanos, strict=True)
            ]
            versions.append(do_propose_prices(Proposal(tuple(prices)), book=book, currency=currency, effective_from=at))
        if book != "list":
            do_assign_book(tenants[currency], book)
        for version in versions:
            do_publish_prices(version, by=None)
    return tenants


class MonthHistory:
    """A history of a tenant in USD and one in another currency. Inside `open_history`."""

    def __init__(self, tenants: dict[str, Tenant], currency: str) -> None:
        self.currencies = ("USD", currency)
        self.tenants = [tenants[each] for each in self.currencies]
        self.closed: list[Period] = []
        self.notes = [0, 0]  # cents of operators' debit notes, less credit notes
        self.changes = 0  # deletions and restorations
        self.prices = {
            (row.book.name, row.model, row.component, row.effective_from == CHANGE): row.pk
            for row in Price.objects.select_related("book")
        }

    def run(self, steps: Iterable[Step]) -> None:
        """Run the steps and `settle`, and compare the documents with the oracle."""
        steps = list(steps)
        try:
            for name, *arguments in steps:
                getattr(self, name)(*arguments)
            self.settle()
        except Difference as exc:
            raise Difference(f"{exc}\nin {self.currencies[1]}: {steps}") from None

    # Usage

    def use(self, tenant: int, month: int, day: int, model: int, uncached: int, output: int) -> None:
        """Settle usage. If its month is closed, it is late."""
        at = STARTS[month] + timedelta(days=DAYS[day])
        tokens = zip(COMPONENTS, (uncached, output), strict=False)
        book = BOOKS[self.currencies[tenant]]
        used = [(self.prices[book, MODELS[model], part, at >= CHANGE], count) for part, count in tokens if count]
        if used:
            use(self.tenants[tenant], at, *used)

    def reverse(self, index: int) -> None:
        """Reverse an execution that was not reversed yet."""
        reversed_ids = set(Adjustment.objects.all_tenants().values_list("request_id", flat=True))
        events = [row for row in UsageEvent.objects.all_tenants() if row.request_id not in reversed_ids]
        if events:
            row = sorted(events, key=lambda event: (event.settled_at, event.request_id))[index % len(events)]
            take_back(row, datetime.now(UTC))

    def meter(self, tenant: int, month: int, day: int, model: int, tokens: int, minutes: int) -> None:
        """Record cache storage. If its month is closed, it is late."""
        at = STARTS[month] + timedelta(days=DAYS[day])
        number = MeteredUsage.objects.all_tenants().count()
        do_record_metered_usage(
            *(self.tenants[tenant], Component.CACHE_STORAGE, MODELS[model], tokens, at),
            at + timedelta(minutes=minutes),
            reference=f"storage {number}",
        )

    def reverse_metered(self, index: int) -> None:
        rows = list(MeteredUsage.objects.all_tenants().filter(reverses=None).order_by("pk"))
        if rows:
            do_reverse_metered_usage(rows[index % len(rows)])

    def add_one_off(self, tenant: int, month: int, cents: int) -> None:
        do_add_one_off_line(self.tenants[tenant], month=month_label(month), description="Setup", cents=cents)

    def repeat(self, tenant: int, first: int, months: int, cents: int) -> None:
        """Add a one-off line that repeats for some months."""
        with suppress(Conflict):  # its first month is closed
            do_add_one_off_line(
                self.tenants[tenant], month=month_label(first), description="Support", cents=cents, months=months + 1
            )

    def end_repeating(self, index: int, month: int) -> None:
        rows = list(OneOffLine.objects.all_tenants().exclude(last_month="").order_by("pk"))
        with suppress(Conflict):
            if rows and month_label(month) >= (row := rows[index % len(rows)]).month:
                do_end_one_off_line(row, month_label(month))

    # Agreements

    def commit(self, tenant: int, first: int, months: int, fee: int, included: int, day: int = 0) -> None:
        """Add a commitment of some months, or with 0 without an end. `day` is the first charged one, or 0."""
        with suppress(Conflict):  # its first month is closed
            do_commit(
                *(self.tenants[tenant], "Base"),
                fee=fee,
                included_nano=included * 10**7,
                first_month=month_label(first),
                last_month=month_label(first + months - 1) if months else "",
                starts_on=first_day(first, day),
            )

    def end_commitment(self, index: int, month: int) -> None:
        rows = list(Commitment.objects.all_tenants().order_by("pk"))
        with suppress(Conflict):
            if rows and month_label(month) >= (row := rows[index % len(rows)]).first_month:
                do_end_commitment(row, month_label(month))

    def add_minimum(self, tenant: int, first: int, months: int, cents: int, day: int = 0) -> None:
        """Add a minimum of some months, or with 0 without an end. `day` is the first charged one, or 0."""
        self._add_term(tenant, TermRule(TermType.MINIMUM, cents=cents), first, months, day)

    def add_discount(self, tenant: int, first: int, months: int, model: int, ppm: int) -> None:
        """Add a discount for one model, or with 2 for all."""
        self._add_term(tenant, TermRule(TermType.DISCOUNT, (*MODELS, "")[model], ppm=ppm), first, months)

    def add_tiers(self, tenant: int, first: int, months: int, model: int, is_volume: bool) -> None:
        kind = TermType.VOLUME if is_volume else TermType.GRADUATED
        self._add_term(tenant, TermRule(kind, MODELS[model], component=Component.UNCACHED, tiers=TIERS), first, months)

    def _add_term(self, tenant: int, rule: TermRule, first: int, months: int, day: int = 0) -> None:
        last = month_label(first + months - 1) if months else ""
        with suppress(Conflict):  # its first month is closed
            do_add_price_term(
                self.tenants[tenant],
                rule,
                description=rule.term_type,
                first_month=month_label(first),
                last_month=last,
                starts_on=first_day(first, day),
            )

    def end_term(self, index: int, month: int) -> None:
        rows = list(PriceTerm.objects.all_tenants().order_by("pk"))
        with suppress(Conflict):
            if rows and month_label(month) >= (row := rows[index % len(rows)]).first_month:
                do_end_price_term(row, month_label(month))

    # Corrections

    def rerate(self, tenant: int, model: int, component: int, start: int, halves: int, nano: int) -> None:
        """Correct a price for some half months, also of usage that is not invoiced yet."""
        halves_of = [at + timedelta(days=days) for at in STARTS for days in (0, 14)]
        new = NewPrice(MODELS[model], Tier.STANDARD, COMPONENTS[component], nano)
        book = BOOKS[self.currencies[tenant]]
        until = halves_of[min(start + halves, len(halves_of) - 1)]
        row = do_propose_rerating(Proposal((new,)), halves_of[start], until, reason="Wrong price", book=book)
        do_apply_rerating(row, by=None)

    def issue_notes(self) -> None:
        """Issue the notes of applied re-ratings that are due."""
        report = continue_reratings()
        if report.left:
            raise Difference(report.left)

    def credit(self, index: int, cents: int) -> None:
        self._issue(do_issue_credit_note, index, cents, -1)

    def debit(self, index: int, cents: int) -> None:
        self._issue(do_issue_debit_note, index, cents, 1)

    def _issue(self, do_issue: Any, index: int, cents: int, sign: int) -> None:
        rows = Invoice.objects.all_tenants().filter(invoice_type=Invoice.InvoiceType.INVOICE, number__isnull=False)
        invoices = list(rows.order_by("pk"))
        with suppress(Conflict):  # less is left to credit
            if invoices:
                row = invoices[index % len(invoices)]
                do_issue(row, [("Agreed", cents)], "Agreed")
                self.notes[[tenant.pk for tenant in self.tenants].index(row.tenant_id)] += sign * cents

    # Tenants

    def delete(self, tenant: int) -> None:
        with at_time(self._now()):
            do_delete_tenant(self.tenants[tenant])

    def restore(self, tenant: int) -> None:
        with at_time(self._now()):
            do_restore_tenant(self.tenants[tenant])

    def _now(self) -> datetime:
        """Return a time in the first month that is not closed, later than the times of earlier changes."""
        self.changes += 1
        return STARTS[len(self.closed)] + timedelta(days=9, minutes=self.changes)

    # Invoices

    def invoice(self) -> None:
        """Close and invoice the next month, and compare each preview with its draft."""
        if len(self.closed) < len(STARTS) - 2:
            self._invoice()

    def _invoice(self) -> None:
        month = period(STARTS[len(self.closed)])
        do_close_period(month, now=over(month))
        month.refresh_from_db()
        self.closed.append(month)
        rows = Tenant.objects.all_tenants()  # their current state: deleted or not
        shown = [preview(rows.get(pk=tenant.pk), month.starts_at) for tenant in self.tenants]
        drafts = do_draft(month)
        for tenant, found in zip(self.tenants, shown, strict=True):
            own = [row for row in drafts if row.tenant_id == tenant.pk]
            _compare_preview(found, [row for row in own if row.invoice_type == Invoice.InvoiceType.INVOICE])
        for draft in drafts:
            issued = do_finalize(draft, now=month.ends_at)
            if issued.invoice_type == Invoice.InvoiceType.INVOICE:
                self._compare_minimum(issued)

    def _compare_minimum(self, invoice: Invoice) -> None:
        """Compare the usage of an invoice with the minimum, which is a whole number of cents."""
        tenant = [tenant.pk for tenant in self.tenants].index(invoice.tenant_id)
        wanted = usage_cost(invoice.tenant_id, invoice.period, self.closed, self.currencies[tenant])
        kinds = InvoiceLine.LineType
        lines = lines_of(invoice).filter(line_type__in=(kinds.USAGE, kinds.METERED, kinds.TERM))
        billed = sum(line.cents for line in lines)
        terms = PriceTerm.objects.for_tenant(invoice.tenant_id).filter(rule__term_type=TermType.MINIMUM.value)
        minimums = {term.rule_in(invoice.period.label).cents for term in terms}
        if wanted in minimums and billed != wanted:
            raise Difference(f"{invoice}: usage of {billed} with a minimum of {wanted}")

    def settle(self) -> None:
        """Invoice all months and every correction, and compare the documents with the oracle."""
        while len(self.closed) < len(STARTS) - 2:
            self._invoice()
        self.issue_notes()
        for tenant in self.tenants:  # their last invoices bill also their own rounding
            with at_time(self._now()):
                do_delete_tenant(tenant)
            do_add_one_off_line(tenant, month=month_label(3), description="Last", cents=LAST_LINE)
        self._invoice()
        self.issue_notes()
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
            cursor.execute("SET CONSTRAINTS ALL DEFERRED")
        for number, tenant in enumerate(self.tenants):
            self._compare(number, tenant)

    def compare_balances(self, now: datetime) -> None:
        """Compare what the gates of the tenants would count at a time, before any invoice, with the oracle."""
        months = [period(at) for at in STARTS[: FIRST_OPEN + 1]]
        for tenant, currency in zip(self.tenants, self.currencies, strict=True):
            profile = BillingProfile(tenant=tenant, entity=months[0].entity, is_prepaid=True)
            found = available_nano(Tenant.objects.all_tenants().get(pk=tenant.pk), profile, now)
            wanted = -owed_for(tenant.pk, months, now, currency) * 10**9 / MINOR_UNITS[currency]
            if not abs(found - wanted) < 2:  # each discount is rounded to a femto-unit, and the balance down
                raise Difference(f"{tenant} at {now}: {found} is available, oracle {float(wanted)}")

    def _compare(self, number: int, tenant: Tenant) -> None:
        rows = list(Invoice.objects.for_tenant(tenant).filter(number__isnull=False))
        billed = sum(row.subtotal * (-1 if row.is_credit_note else 1) for row in rows)
        wanted = cost_of(tenant.pk, self.closed, self.currencies[number]) + self.notes[number]
        carried = _carried(rows)
        if not abs(billed - wanted) < 1 + carried:
            raise Difference(f"{tenant}: billed {billed}, oracle {float(wanted)}, carried {float(carried)}")
        empty = [row.number for row in rows if row.subtotal == 0 and row.refers_to_id]
        if empty:
            raise Difference(f"{tenant}: notes of 0.00: {empty}")


def _compare_preview(shown: tuple[Invoice, list[InvoiceLine]] | None, drafts: list[Invoice]) -> None:
    """Compare what a tenant is shown with its drafts of the same moment: one, or none if nothing is due."""
    if shown is None:
        raise Difference("a month without a preview")
    invoice, lines = shown
    if not drafts:
        if invoice.subtotal or sum(int(line.femto) for line in lines):
            raise Difference(f"a preview of {invoice.subtotal} without a draft")
        return
    (draft,) = drafts
    names = ("subtotal", "taxable", "total", "credits", "taxes", "rounding_femto", "saved_femto", "events")
    found, wanted = ([getattr(row, name) for name in names] for row in (invoice, draft))
    of_lines = [[_values(row) for row in rows] for rows in (lines, lines_of(draft))]
    if found != wanted or of_lines[0] != of_lines[1]:
        raise Difference(f"preview {found} {of_lines[0]}, draft {wanted} {of_lines[1]}")


def _carried(rows: list[Invoice]) -> Fraction:
    """Return the most that rounding of lines may differ on notes that were issued after the last invoice."""
    last = max(row.pk for row in rows if row.invoice_type == Invoice.InvoiceType.INVOICE)
    later = [row.pk for row in rows if row.pk > last]
    return Fraction(InvoiceLine.objects.for_tenant(rows[0].tenant_id).filter(invoice__in=later).count(), 2)


def _values(line: InvoiceLine) -> tuple[Any, ...]:
    return line.position, line.line_type, line.description, line.tokens, int(line.femto), line.cents


@contextmanager
def open_history(tenants: dict[str, Tenant], currency: str) -> Iterator[MonthHistory]:
    """Open a history whose transaction is rolled back at its end."""
    with suppress(Undone), ExitStack() as scopes:
        scopes.enter_context(transaction.atomic())
        # Inside it, the scope of an action sends two statements to the database instead of four.
        scopes.enter_context(all_tenants_scope(BypassReason.BILLING))
        yield MonthHistory(tenants, currency)
        raise Undone
