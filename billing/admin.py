"""Read-only views of billing under /operator/django-admin/. Only actions change amounts, and each writes an audit
entry.

Usage events, adjustments and rollups have no page, because Django's admin does not support composite primary keys.
"""

from __future__ import annotations

from django.contrib import admin

from billing import models as m
from tenants.admin import ReadOnlyAdmin


@admin.register(
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
)
class MoneyAdmin(ReadOnlyAdmin):
    """The page of models that need no list of their own."""


@admin.register(m.Budget)
class BudgetAdmin(ReadOnlyAdmin):
    list_display = ("name", "tenant", "unit", "period", "amount", "mode", "active")


@admin.register(m.BudgetPeriod)
class BudgetPeriodAdmin(ReadOnlyAdmin):
    list_display = ("id", "tenant_id", "budget_id", "unit", "period_start", "used", "reserved")


@admin.register(m.BudgetLease)
class BudgetLeaseAdmin(ReadOnlyAdmin):
    list_display = ("id", "tenant_id", "gateway_id", "money", "settled_money", "open", "created_at", "reclaim_at")


@admin.register(m.Reconciliation)
class ReconciliationAdmin(ReadOnlyAdmin):
    list_display = ("created_at", "budget_periods", "corrected", "overdue_leases", "quarantined")


@admin.register(m.UsageQuarantine)
class UsageQuarantineAdmin(ReadOnlyAdmin):
    list_display = ("stream_id", "received_at", "reason", "detail", "resolved_at")
    exclude = ("payload", "payload_hash")


@admin.register(m.Period)
class PeriodAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__")


@admin.register(m.Invoice)
class InvoiceAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__", "tenant")


@admin.register(m.InvoiceLine)
class InvoiceLineAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__", "invoice")


@admin.register(m.Payment)
class PaymentAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__")


@admin.register(m.PaymentEvent)
class PaymentEventAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__", "event_type", "status", "received_at")


@admin.register(m.LedgerTransaction)
class LedgerTransactionAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__")


@admin.register(m.LedgerEntry)
class LedgerEntryAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__")


@admin.register(m.PriceVersion)
class PriceVersionAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__", "tenant_id", "state", "effective_from")


@admin.register(m.Price)
class PriceAdmin(ReadOnlyAdmin):
    list_display = ("model", "tier", "component", "nano_per_million", "tenant_id", "effective_from", "effective_until")


@admin.register(m.CompiledRateCard)
class CompiledRateCardAdmin(ReadOnlyAdmin):
    list_display = ("id", "model", "tier", "tenant_id", "effective_from")
    exclude = ("rates",)
