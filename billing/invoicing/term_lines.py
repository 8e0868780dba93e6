"""Invoice lines of price terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from django.db.models import Q, QuerySet

from billing.currencies.amounts import cents
from billing.invoicing.corrected_prices import differences
from billing.invoicing.lines import find_usage, rerated_differences, usage_lines
from billing.invoicing.metered_lines import metered_lines
from billing.ledger.open_months import active_in
from billing.metering.archives import require_usage
from billing.models import Invoice, InvoiceLine, Period, PriceTerm, ReratedInvoice
from billing.rates.terms import MonthlyUsage, TermRule, TermType, UsageKey, added_by_minimums, changes
from tenants.deletions import deleted_throughout, was_deleted_throughout


def active_minimums(period: Period) -> QuerySet[PriceTerm]:
    """Return the minimums of all tenants in the period's month.

    A tenant that was deleted for the whole period has none.
    """
    rows = PriceTerm.objects.all_tenants().filter(active_in(period.label), rule__term_type=TermType.MINIMUM.value)
    return rows.exclude(deleted_throughout(period.starts_at, period.ends_at)).order_by("pk")


def terms_of(period: Period, tenant_id: int) -> list[PriceTerm]:
    """Return the price terms of a tenant in the period's month.

    A tenant that was deleted for the whole period has no minimum. Late usage still has its tiers and discounts.
    """
    terms = list(PriceTerm.objects.for_tenant(tenant_id).filter(active_in(period.label)).order_by("pk"))
    others = [term for term in terms if term.rule["term_type"] != TermType.MINIMUM.value]
    if len(others) < len(terms) and was_deleted_throughout(tenant_id, period.starts_at, period.ends_at):
        return others
    return terms


def term_lines(invoice: Invoice, lines: Iterable[InvoiceLine], *, has_minimum: bool = True) -> list[InvoiceLine]:
    """Return the lines of the price terms of an invoice with these lines.

    Terms never make it negative. A minimum raises the sum of the rounded lines; its exact amount raises the exact sum.
    """
    month = invoice.period.label
    found = [(term, term.rule_in(month)) for term in terms_of(invoice.period, invoice.tenant_id)]
    terms = [(term, rule) for term, rule in found if has_minimum or rule.term_type != TermType.MINIMUM]
    if not terms:
        return []
    rules, covered = [rule for _, rule in terms], _covered_by_terms(lines)
    added = changes(rules, usage_of(covered), invoice.currency, _metered_cost(covered))
    subtotal = sum(line.cents for line in covered)
    amounts = [0] * len(rules)
    for place in sorted(range(len(rules)), key=lambda place: rules[place].term_type == TermType.MINIMUM):
        if rules[place].term_type == TermType.MINIMUM:
            amounts[place] = max(0, rules[place].cents - subtotal)
        else:
            amounts[place] = max(cents(added[place], invoice.currency), -subtotal)
        subtotal += amounts[place]
    changed = zip(terms, added, amounts, strict=True)
    return [
        _line(invoice, term.share_in(month).describe(term.description), femto, amount)
        for (term, _), femto, amount in changed
        if femto or amount
    ]


def term_change(note: Invoice, lines: Iterable[InvoiceLine]) -> list[InvoiceLine]:
    """Return the line by which a note with these lines is what its month costs now, minus the documents so far.

    While a minimum applies, the note is rounded as a whole: the rounding of its lines must not change the minimum.
    Amounts have the sign of the note.
    """
    billed, covered = note.refers_to, _covered_by_terms(lines)
    if billed is None or not covered:
        return []
    rules = _rules_of(billed)
    if not rules:
        return []
    sign = -1 if note.is_credit_note else 1
    before = _read_documents(billed, note)
    cost, has_minimum = _cost(rules, [*before.lines, *covered], note.currency)
    change = sign * (cost - before.femto)
    femto = change - sum(int(line.femto) for line in covered)
    amount = cents(femto, note.currency)
    if has_minimum:
        amount = cents(change, note.currency) - sum(line.cents for line in covered)
    return [_line(note, "Tiers, discounts and minimum", femto, amount)] if femto or amount else []


def month_difference(billed: Invoice) -> int:
    """Return what the documents of an invoice's month lack, in femto-units. Negative: they charge too much.

    It is 0, unless an earlier release computed them by other rules. The next note of the month includes it.
    """
    before = _read_documents(billed, None)
    rules = _rules_of(billed)
    return _cost(rules, before.lines, billed.currency)[0] - before.femto


def _rules_of(billed: Invoice) -> list[TermRule]:
    """Return the rules of an invoice's month."""
    return [term.rule_in(billed.period.label) for term in terms_of(billed.period, billed.tenant_id)]


def _cost(rules: Sequence[TermRule], lines: Iterable[InvoiceLine], currency: str) -> tuple[int, bool]:
    """Return the cost of a month with these lines of usage, and whether a minimum raises it."""
    covered = list(lines)
    usage, metered = usage_of(covered), _metered_cost(covered)
    added = changes(rules, usage, currency, metered)
    cost = sum(item.femto for item in usage.values()) + metered + sum(added)
    return cost, added_by_minimums(rules, added) > 0


class _Documents(NamedTuple):
    """The documents on a month so far: their lines without those of terms, and the exact sum of all their lines."""

    lines: list[InvoiceLine]
    femto: int


def _read_documents(billed: Invoice, note: Invoice | None) -> _Documents:
    """Read the final invoice of a month and its notes without `note`, with the changes that have no document.

    Raises:
        Conflict: there are such changes, and the usage is archived.
    """
    documents = Invoice.objects.for_tenant(billed.tenant_id).filter(Q(pk=billed.pk) | Q(refers_to=billed))
    known = documents.filter(number__isnull=False).exclude(state=Invoice.State.VOID)
    if note is not None:
        known = known.exclude(pk=note.pk)
    rows = InvoiceLine.objects.for_tenant(billed.tenant_id).filter(
        Q(price_id__isnull=False) | Q(line_type__in=[InvoiceLine.LineType.METERED, InvoiceLine.LineType.TERM]),
        invoice__in=known,
    )
    found = list(rows.select_related("invoice"))
    femto = sum(_sign(line) * int(line.femto) for line in found)
    lines = _covered_by_terms(found)
    carried = ReratedInvoice.objects.for_tenant(billed.tenant_id).filter(invoice=billed, note=None)
    for row in carried.select_related("rerating").order_by("pk"):
        require_usage(billed.period_id)
        femto -= int(row.rounding_femto)
        lines += _recompute_lines(row, billed)
    return _Documents(lines, femto)


def _recompute_lines(row: ReratedInvoice, billed: Invoice) -> list[InvoiceLine]:
    """Return the lines of a re-rating or a reversal that changed no cent and has no document."""
    note = Invoice(tenant_id=billed.tenant_id, currency=billed.currency, refers_to=billed)
    if row.rerating is not None:
        note.invoice_type = Invoice.InvoiceType.DEBIT_NOTE
        return usage_lines(note, (), differences(row.rerating, billed, row.closed_periods))
    note.invoice_type = Invoice.InvoiceType.CORRECTION
    note.period = Period.objects.select_related("entity").get(pk=row.closed_periods[0])
    usage = find_usage(note.period, note.tenant_id).get(billed.tenant_id, [])
    return [*usage_lines(note, usage, rerated_differences(note)), *metered_lines(note)]


def _covered_by_terms(lines: Iterable[InvoiceLine]) -> list[InvoiceLine]:
    """Return the lines of usage and metered usage."""
    return [line for line in lines if line.price_id is not None or line.line_type == InvoiceLine.LineType.METERED]


def _metered_cost(lines: Iterable[InvoiceLine]) -> int:
    return sum(_sign(line) * int(line.femto) for line in lines if line.line_type == InvoiceLine.LineType.METERED)


def _sign(line: InvoiceLine) -> int:
    return -1 if line.invoice.is_credit_note else 1


def usage_of(lines: Iterable[InvoiceLine]) -> dict[UsageKey, MonthlyUsage]:
    """Return the usage of lines by model, tier and component. Lines of re-ratings have a cost and no tokens."""
    found: dict[UsageKey, MonthlyUsage] = {}
    for line in lines:
        if line.price_id is None:
            continue
        key = line.model, line.tier, line.component
        known = found.get(key, MonthlyUsage(0, 0))
        sign = _sign(line)
        tokens = 0 if line.description else sign * line.tokens
        found[key] = MonthlyUsage(known.tokens + tokens, known.femto + sign * int(line.femto))
    return found


def _line(invoice: Invoice, description: str, femto: int, amount: int) -> InvoiceLine:
    return InvoiceLine(
        invoice=invoice,
        tenant_id=invoice.tenant_id,
        line_type=InvoiceLine.LineType.TERM,
        description=description,
        femto=femto,
        cents=amount,
    )
