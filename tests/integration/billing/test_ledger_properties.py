"""Random histories of usage, invoices, payments, credits, corrections and re-ratings, checked after every history.

The short form runs with the other tests; `-m slow` runs longer histories.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, suppress
from datetime import UTC, date, datetime
from functools import cache
from typing import Any, ClassVar

import pytest
from django.db import connection, transaction
from django.db.models import Sum
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from billing.currencies.amounts import femto_a_cent, nano_a_cent
from billing.invoicing import document, facturx, pdf
from billing.invoicing.checks import recompute_document
from billing.invoicing.corrections import (
    do_claim_tax_relief,
    do_issue_credit_note,
    do_issue_debit_note,
    do_void,
    do_write_off,
)
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.lines import Count, UsageLine, count_usage, find_usage
from billing.invoicing.one_off_lines import do_add_one_off_line
from billing.invoicing.price_terms import do_add_price_term
from billing.invoicing.reratings import continue_reratings, do_apply_rerating, do_propose_rerating
from billing.ledger import credits
from billing.ledger.bad_debts import has_relief, relieved_tax, tax_in, written_off
from billing.ledger.credits import with_rest
from billing.ledger.ledger import balance, sum_booked
from billing.ledger.matching import sum_outstanding
from billing.models import (
    CHARGES,
    Account,
    Adjustment,
    BillingEntity,
    CreditGrant,
    Invoice,
    LedgerEntry,
    LedgerTransaction,
    OneOffLine,
    Payment,
    Price,
    PriceBook,
    PriceTerm,
    ReratedInvoice,
    TaxRule,
    UsageEvent,
)
from billing.payments.recording import Received, do_record_payment
from billing.periods import default_entity
from billing.pricing.prices import do_assign_book
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from billing.rates.terms import MonthlyUsage, TermRule, TermType, UsageKey, VolumeTier, changes
from tenants.actions import Conflict, do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import OCTOBER, make_months, over, period, price, take_back, use

pytestmark = pytest.mark.django_db
MONTHS = tuple(OCTOBER.replace(month=month) for month in (10, 11, 12))
ENDS = (*(datetime(2026, month, 1, tzinfo=UTC) for month in (10, 11, 12)), datetime(2027, 1, 1, tzinfo=UTC))
CENTS = st.integers(1, 3000)
TENANT = st.integers(0, 1)
INDEX = st.integers(0, 30)
MODELS = ("alpha", "beta")
USAGE = st.tuples(TENANT, st.integers(0, 2), st.sampled_from(MODELS), st.integers(1, 9_000_000))
TERMS = (
    TermRule(
        TermType.GRADUATED,
        "alpha",
        component=Component.UNCACHED,
        tiers=(VolumeTier(0, 0), VolumeTier(4_000_000, 2_345_678_901)),
    ),
    TermRule(TermType.DISCOUNT, ppm=77_777),
    TermRule(TermType.MINIMUM, cents=1_234),
)


class Undone(Exception):
    """The end of a history, whose transaction is rolled back."""


class BillingHistory(RuleBasedStateMachine):
    """A history of two tenants in three months. The model is the price that each event should cost now."""

    tenants: ClassVar[list[Tenant]] = []  # the same in all histories of a run

    def __init__(self) -> None:
        super().__init__()
        self.scopes = ExitStack()
        self.scopes.enter_context(transaction.atomic())
        # Inside it, the scope of an action sends two statements to the database instead of four. Other tests of the
        # actions have no scope around them.
        self.scopes.enter_context(all_tenants_scope(BypassReason.BILLING))
        self.closed = 0  # months
        self.number = 0
        self.fixed = [0, 0]  # cents of debit notes, credit notes and one-off lines that are not usage
        self.compared = [True, True]  # whether the documents' sum is known: not after a void
        self.reratings: list[tuple[str, str, datetime, datetime, int]] = []
        self.charged = cache(lambda pk: Price.objects.select_related("book").get(pk=pk))  # prices never change

    @initialize(
        percent=st.sampled_from([0, 10, 19]),
        has_terms=st.booleans(),
        used=st.lists(USAGE, min_size=3, max_size=8),
        invoiced=st.integers(1, 3),
        voucher_type=st.sampled_from(BillingEntity.VoucherType.values),
        relief_after_claim=st.booleans(),
        currency=st.sampled_from(["USD", "EUR", "JPY", "KWD"]),
    )
    def start(
        self,
        percent: int,
        has_terms: bool,
        used: list[tuple[int, int, str, int]],
        invoiced: int,
        voucher_type: str,
        relief_after_claim: bool,
        currency: str,
    ) -> None:
        for term in TERMS if has_terms else ():
            do_add_price_term(self.tenants[0], term, description=term.term_type, first_month="2026-10")
        self.books = [PriceBook.LIST, PriceBook.LIST if currency == "USD" else currency.lower()]
        self.currencies = ["USD", currency]
        self.prices = {
            book: {model: price("3.337", model=model, book=book, currency=currency) for model in MODELS}
            for book, currency in dict(zip(self.books, self.currencies, strict=True)).items()
        }
        do_assign_book(self.tenants[1], self.books[1])
        with all_tenants_scope(BypassReason.BILLING):
            BillingEntity.objects.filter(pk=default_entity().pk).update(
                voucher_type=voucher_type, relief_after_claim=relief_after_claim
            )
        if percent:
            with all_tenants_scope(BypassReason.BILLING):
                TaxRule.objects.create(
                    entity=default_entity(), category="S", rate_ppm=percent * 10_000, starts_on=date(2026, 1, 1)
                )

        for usage in used:
            self.use(usage)
        for _ in range(invoiced):
            self.invoice_month()

    def teardown(self) -> None:
        try:
            if hasattr(self, "prices"):
                with all_tenants_scope(BypassReason.BILLING):
                    self.check_history()
        finally:
            with suppress(Undone), self.scopes:
                raise Undone

    # Events

    @rule(usage=USAGE)
    def use(self, usage: tuple[int, int, str, int]) -> None:
        tenant, month, model, tokens = usage
        use(self.tenants[tenant], MONTHS[month], (self.prices[self.books[tenant]][model], tokens))

    @rule(index=INDEX)
    def reverse(self, index: int) -> None:
        with all_tenants_scope(BypassReason.BILLING):
            known = set(Adjustment.objects.all_tenants().values_list("request_id", flat=True))
            events = [row for row in UsageEvent.objects.all_tenants() if row.request_id not in known]
        if events:
            take_back(sorted(events, key=lambda row: row.request_id)[index % len(events)], datetime.now(UTC))

    @precondition(lambda self: self.closed < 3)
    @rule()
    def invoice_month(self) -> None:
        month = period(MONTHS[self.closed])
        do_close_period(month, now=over(month))
        self.closed += 1
        for draft in do_draft(month):
            do_finalize(draft, now=month.ends_at)

    @rule(tenant=TENANT, cents=CENTS, as_credit=st.booleans())
    def pay(self, tenant: int, cents: int, as_credit: bool) -> None:
        self._record(tenant, cents, as_credit=as_credit)

    @rule(tenant=TENANT, cents=CENTS, index=INDEX)
    def refund(self, tenant: int, cents: int, index: int) -> None:
        """Refund a payment, or an amount without one."""
        with suppress(Conflict):
            refunded = {"refund_of": f"p{index % self.number + 1}"} if index % 2 and self.number else {}
            self._record(tenant, -cents, **refunded)

    def _record(self, tenant: int, cents: int, **fields: Any) -> None:
        self.number += 1
        received = Received("manual", f"p{self.number}", cents, OCTOBER, tenant=self.tenants[tenant].slug, **fields)
        do_record_payment(received)

    @rule(tenant=TENANT, cents=CENTS)
    def grant(self, tenant: int, cents: int) -> None:
        row = self.tenants[tenant]
        nano = cents * nano_a_cent(self.currencies[tenant])
        credits.do_grant_credit(row, CreditGrant.GrantType.PROMOTIONAL, nano, starts_at=OCTOBER)

    @rule(tenant=TENANT, month=st.integers(0, 2), cents=CENTS)
    def add_one_off_line(self, tenant: int, month: int, cents: int) -> None:
        do_add_one_off_line(self.tenants[tenant], month=f"{MONTHS[month]:%Y-%m}", description="Setup", cents=cents)

    # Corrections

    def _document(self, index: int) -> Invoice | None:
        with all_tenants_scope(BypassReason.BILLING):
            rows = Invoice.objects.all_tenants().filter(number__isnull=False)
            pks = list(rows.order_by("pk").values_list("pk", flat=True))
            return rows.get(pk=pks[index % len(pks)]) if pks else None

    @rule(index=INDEX, cents=CENTS)
    def credit(self, index: int, cents: int) -> None:
        row = self._document(index)
        with suppress(Conflict):
            if row is not None and do_issue_credit_note(row, [("Goodwill", cents)], "Goodwill"):
                self._fix(row, -cents)

    @rule(index=INDEX, cents=CENTS)
    def debit(self, index: int, cents: int) -> None:
        row = self._document(index)
        with suppress(Conflict):
            if row is not None and do_issue_debit_note(row, [("Support", cents)], "Support"):
                self._fix(row, cents)

    def _fix(self, row: Invoice, cents: int) -> None:
        self.fixed[[tenant.pk for tenant in self.tenants].index(row.tenant_id)] += cents

    @rule(index=INDEX)
    def void(self, index: int) -> None:
        row = self._document(index)
        with suppress(Conflict):
            if row is not None and do_void(row, "Wrong"):
                self.compared[[tenant.pk for tenant in self.tenants].index(row.tenant_id)] = False

    @rule(index=INDEX)
    def write_off(self, index: int) -> None:
        row = self._document(index)
        with suppress(Conflict):
            if row is not None:
                do_write_off(row, "Insolvent")

    @rule(index=INDEX)
    def claim_relief(self, index: int) -> None:
        row = self._document(index)
        with suppress(Conflict):
            if row is not None:
                do_claim_tax_relief(row, "Claimed")

    @rule(
        tenant=TENANT,
        model=st.sampled_from(MODELS),
        start=st.integers(0, 2),
        months=st.integers(1, 3),
        usd=st.integers(0, 9999),
    )
    def rerate(self, tenant: int, model: str, start: int, months: int, usd: int) -> None:
        nano, since, until = usd * 10**6, ENDS[start], ENDS[min(3, start + months)]
        new = NewPrice(model, Tier.STANDARD, Component.UNCACHED, nano)
        book = self.books[tenant]
        row = do_propose_rerating(Proposal((new,)), since, until, reason="Wrong price", book=book)
        do_apply_rerating(row, by=None)
        self.reratings.append((book, model, since, until, nano))

    @rule()
    def issue_notes(self) -> None:
        assert continue_reratings().left == []

    # Checks

    def check_history(self) -> None:
        assert continue_reratings().left == []
        assert continue_reratings().issued == []
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
            cursor.execute("SET CONSTRAINTS ALL DEFERRED")
        rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to__period")
        final = list(rows.filter(number__isnull=False).order_by("pk"))
        months = cache(lambda month, tenant_id: (find_usage(month, tenant_id), count_usage(month, tenant_id)))
        for row in final:
            self.check_document(row, *months(row.period, row.tenant_id))
        self.check_entries()
        for number, tenant in enumerate(self.tenants):
            own = [row for row in final if row.tenant_id == tenant.pk]
            self.check_tenant(tenant.pk, own, nano_a_cent(self.currencies[number]))
            if self.compared[number]:
                self.check_amount(tenant.pk, own, self.fixed[number], self.currencies[number])

    def check_document(self, row: Invoice, uses: dict[int, list[UsageLine]], counts: dict[int, Count]) -> None:
        """The document is byte-equal when recomputed, and the ledger has its tax and revenue."""
        made = recompute_document(row, uses.get(row.tenant_id, []), counts.get(row.tenant_id, Count()))
        assert hashlib.sha256(document.encode_document(made)).hexdigest() == row.sha256, (row, made)
        sign, unit = 1 if row.is_credit_note else -1, nano_a_cent(row.currency)
        taxed = sum_booked(row.tenant_id, f"invoice:{row.pk}", Account.TAX)
        assert taxed == sign * sum(tax["tax"] for tax in row.taxes) * unit
        account = Account.CREDITS if row.sells_credit else Account.REVENUE
        assert sum_booked(row.tenant_id, f"invoice:{row.pk}", account) == sign * row.booked_revenue * unit
        limits = (0, row.total) if row.invoice_type in CHARGES else (0, 0)
        assert limits[0] <= sum_outstanding(row) <= limits[1]
        assert row.total == row.taxable + sum(tax["tax"] for tax in row.taxes) >= 0

    def check_entries(self) -> None:
        """Every transaction sums to zero and belongs to a document, a payment or a credit."""
        models = dict.fromkeys(("invoice", "match", "recovery", "bad-debt", "tax-relief"), Invoice)
        models |= {"payment": Payment, "grant": CreditGrant, "expiry": CreditGrant}
        known = {model: set(model.objects.all_tenants().values_list("tenant_id", "pk")) for model in models.values()}
        for row in LedgerTransaction.objects.all_tenants():
            name, pk, *_ = row.key.split(":")
            assert (row.tenant_id, int(pk)) in known[models[name]], row.key
        sums = LedgerEntry.objects.all_tenants().values("transaction").annotate(sum=Sum("nano")).exclude(sum=0)
        assert not sums.exists()
        by_currency = LedgerEntry.objects.all_tenants().order_by().values("transaction__currency")
        assert not by_currency.annotate(sum=Sum("nano")).exclude(sum=0).exists()
        for tenant, currency in zip(self.tenants, self.currencies, strict=True):
            for model in (LedgerTransaction, Invoice, Payment):
                assert not model.objects.for_tenant(tenant).exclude(currency=currency).exists()
        of_documents = [Account.RECEIVABLE, Account.TAX, Account.BAD_DEBT]
        assert not LedgerEntry.objects.all_tenants().filter(account__in=of_documents, invoice=None).exists()

    def check_tenant(self, tenant_id: int, documents: list[Invoice], unit: int) -> None:
        """The tax of its documents is in the ledger, and it is owed no more money than it paid."""
        taxes = sum((-1 if row.is_credit_note else 1) * sum(tax["tax"] for tax in row.taxes) for row in documents)
        relieved = sum(relieved_tax(row) for row in documents)
        assert balance(tenant_id, Account.TAX) == relieved - taxes * unit
        for row in documents:
            owed_less = tax_in(row, written_off(row)) if has_relief(row) else 0
            assert relieved_tax(row) == owed_less >= 0, row
        paid = Payment.objects.for_tenant(tenant_id).aggregate(sum=Sum("cents"))["sum"] or 0
        prepaid = with_rest(CreditGrant.objects.for_tenant(tenant_id).filter(grant_type="prepaid"))
        held = -balance(tenant_id, Account.DEPOSITS) + sum(grant.rest for grant in prepaid)
        purchases = [row for row in documents if row.sells_credit]
        held -= sum(sum_outstanding(row) * unit + written_off(row) for row in purchases)  # refunded, and used
        assert held <= paid * unit and paid >= 0
        assert balance(tenant_id, Account.DEPOSITS) <= 0
        assert balance(tenant_id, Account.CASH) == paid * unit
        rest = sum(grant.rest for grant in with_rest(CreditGrant.objects.for_tenant(tenant_id)))
        assert balance(tenant_id, Account.CREDITS) == -rest

    def check_amount(self, tenant_id: int, documents: list[Invoice], fixed: int, currency: str) -> None:
        """The documents' exact sum is the invoiced usage at the corrected prices, and nothing twice."""
        unit = femto_a_cent(currency)
        if any(credit["label"] == "Credited before" for row in documents for credit in row.credits):
            return  # a credit note over the whole invoice came before the correction
        exact = sum(
            (-1 if row.is_credit_note else 1) * (row.subtotal * unit - int(row.rounding_femto))
            for row in documents
            if not row.sells_credit
        )
        ended = {period(month).pk for month in MONTHS[: self.closed]}
        of_events = dict(UsageEvent.objects.for_tenant(tenant_id).values_list("request_id", "invoice_period"))
        usage: dict[int, dict[UsageKey, MonthlyUsage]] = {pk: {} for pk in ended}
        for model in (UsageEvent, Adjustment):
            for item in model.objects.for_tenant(tenant_id).filter(invoice_period__in=ended):
                month = usage[of_events[item.request_id]]
                key = item.model, "standard", "uncached"
                known = month.get(key, MonthlyUsage(0, 0))
                cost = known.femto + item.uncached * self.price_of(item)
                month[key] = MonthlyUsage(known.tokens + item.uncached, cost)
        rules = [term.decode() for term in PriceTerm.objects.for_tenant(tenant_id).order_by("pk")]
        cost = sum(
            sum(item.femto for item in month.values()) + sum(changes(rules, month, currency))
            for month in usage.values()
        )
        one_offs = sum(row.cents for row in self.billed_one_offs(tenant_id))
        carried = sum(int(row.rounding_femto) for row in self.carried(tenant_id))
        assert exact - carried == cost + (fixed + one_offs) * unit

    def price_of(self, item: Any) -> int:
        """Return the nano-USD per million tokens after all re-ratings."""
        charged = self.charged(next(pk for pk in item.price_ids if pk))
        nano = charged.nano_per_million
        for book, model, since, until, corrected in self.reratings:
            if (book, model) == (charged.book.name, item.model) and since <= item.admitted_at < until:
                nano = corrected
        return int(nano)

    def billed_one_offs(self, tenant_id: int) -> list[Any]:
        return list(OneOffLine.objects.for_tenant(tenant_id).filter(invoice__isnull=False))

    def carried(self, tenant_id: int) -> list[Any]:
        return list(ReratedInvoice.objects.for_tenant(tenant_id))


def run(examples: int, steps: int) -> None:
    make_months()  # once: the partitions of a month take as long as some rules
    BillingHistory.tenants = [do_create_tenant(slug, slug.title()) for slug in ("acme", "globex")]
    options = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(BillingHistory, settings=options)


def test_random_histories(db):
    run(6, 15)


# The parts run in several processes. A document's PDF is a function of the data that is compared, and tested elsewhere.
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(4))
def test_many_random_histories(db, monkeypatch, part):
    monkeypatch.setattr(pdf, "render_pdf", facturx.xml)
    run(100, 40)
