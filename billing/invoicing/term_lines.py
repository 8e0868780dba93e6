"""Invoice lines of price terms."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Q, QuerySet

from billing.currencies.amounts import cents
from billing.models import Invoice, InvoiceLine, Period, PriceTerm
from billing.rates.terms import MonthlyUsage, TermType, UsageKey, changes
from tenants.deletions import deleted_throughout


def active_terms(period: Period, tenant_id: int | None = None) -> QuerySet[PriceTerm]:
    """Return the price terms of the period's month, of one tenant or all.

    A tenant that was deleted for the whole period has no minimum. Late usage still has its tiers and discounts.
    """
    rows = PriceTerm.objects.all_tenants() if tenant_id is None else PriceTerm.objects.for_tenant(tenant_id)
    active = rows.filter(Q(last_month="") | Q(last_month__gte=period.label), first_month__lte=period.label)
    is_minimum = Q(rule__term_type=TermType.MINIMUM.value)
    return active.exclude(is_minimum & deleted_throughout(period.starts_at, period.ends_at)).order_by("pk")


def term_lines(invoice: Invoice, lines: list[InvoiceLine]) -> list[InvoiceLine]:
    """Return the lines of the price terms of an invoice with these usage lines. They never make it negative."""
    terms = list(active_terms(invoice.period, invoice.tenant_id))
    if not terms:
        return []
    found: list[InvoiceLine] = []
    subtotal = sum(line.cents for line in lines)
    added = changes([term.decode() for term in terms], usage_of(lines), invoice.currency)
    for term, femto in zip(terms, added, strict=True):
        if femto:
            amount = max(cents(femto, invoice.currency), -subtotal)
            subtotal += amount
            found.append(_line(invoice, term.description, femto, amount))
    return found


def term_change(note: Invoice, lines: Iterable[InvoiceLine]) -> list[InvoiceLine]:
    """Return the line of what a note's usage lines change in the terms of its invoice, after the notes before it."""
    billed = note.refers_to
    if billed is None:
        return []
    rules = [term.decode() for term in active_terms(billed.period, billed.tenant_id)]
    if not rules:
        return []
    lines = list(lines)
    documents = Invoice.objects.for_tenant(billed.tenant_id).filter(Q(pk=billed.pk) | Q(refers_to=billed))
    known = documents.filter(number__isnull=False).exclude(state=Invoice.State.VOID).exclude(pk=note.pk)
    rows = InvoiceLine.objects.for_tenant(billed.tenant_id).filter(invoice__in=known, price_id__isnull=False)
    before = list(rows.select_related("invoice"))
    old, new = (sum(changes(rules, usage_of(part), note.currency)) for part in (before, [*before, *lines]))
    femto = (old - new) if note.is_credit_note else (new - old)
    if not femto:
        return []
    return [_line(note, "Tiers, discounts and minimum", femto, cents(femto, note.currency))]


def usage_of(lines: Iterable[InvoiceLine]) -> dict[UsageKey, MonthlyUsage]:
    """Return the usage of lines by model, tier and component. Lines of re-ratings have a cost and no tokens."""
    found: dict[UsageKey, MonthlyUsage] = {}
    for line in lines:
        if line.price_id is None:
            continue
        key = line.model, line.tier, line.component
        known = found.get(key, MonthlyUsage(0, 0))
        sign = -1 if line.invoice.is_credit_note else 1
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
