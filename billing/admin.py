"""Read-only views of billing under /operator/django-admin/. Only actions change amounts, and each writes an audit
entry.

Usage events, adjustments and rollups have no page, because Django's admin does not support composite primary keys.
"""

from __future__ import annotations

from billing import models as m
from tenants.admin import register

for model in (
    m.BillingEntity,
    m.BillingProfile,
    m.Commitment,
    m.BudgetCorrection,
    m.CreditGrant,
    m.TopUp,
    m.CreditApplication,
    m.ExchangeRate,
    m.InvoiceEmail,
    m.NumberSeries,
    m.PriceBook,
    m.TaxRule,
    m.UsageArchive,
):
    register(model, "__str__")
register(m.Budget, "name", "tenant", "unit", "period", "amount", "mode", "active")
register(m.BudgetPeriod, "id", "tenant_id", "budget_id", "unit", "period_start", "used", "reserved")
register(m.BudgetLease, "id", "tenant_id", "gateway_id", "money", "settled_money", "open", "created_at", "reclaim_at")
register(m.BudgetLeaseSum, "id", "tenant_id", "day", "settled_money", "settled_tokens", "settled_requests")
register(m.Reconciliation, "created_at", "budget_periods", "corrected", "overdue_leases", "quarantined")
register(
    m.UsageQuarantine,
    "stream_id",
    "received_at",
    "reason",
    "detail",
    "resolved_at",
    exclude=("payload", "payload_hash"),
)
register(m.Period, "id", "__str__")
register(m.Invoice, "id", "__str__", "tenant")
register(m.InvoiceLine, "id", "__str__", "invoice")
register(m.Payment, "id", "__str__")
register(m.PaymentEvent, "id", "__str__", "event_type", "status", "received_at")
register(m.LedgerTransaction, "id", "__str__")
register(m.LedgerEntry, "id", "__str__")
register(m.PriceVersion, "id", "__str__", "tenant_id", "state", "effective_from")
register(m.Price, "model", "tier", "component", "nano_per_million", "tenant_id", "effective_from", "effective_until")
register(m.CompiledRateCard, "id", "model", "tier", "tenant_id", "effective_from", exclude=("rates",))
