"""Read-only views of money under /operator/django-admin/. Only actions move amounts, and each leaves an audit entry.

Usage events, adjustments and rollups have no page here: Django's admin knows no keys of several columns, and a question
about usage is one for the console.
"""

from __future__ import annotations

from django.contrib import admin

from billing import models as m
from tenants.admin import ReadOnlyAdmin


@admin.register(
    m.BillingEntity,
    m.BillingProfile,
    m.Commitment,
    m.Correction,
    m.CreditGrant,
    m.CreditUse,
    m.ExchangeRate,
    m.InvoiceMail,
    m.NumberSeries,
    m.PriceBook,
    m.TaxRule,
    m.UsageArchive,
)
class MoneyAdmin(ReadOnlyAdmin):
    """What says enough by its name."""


@admin.register(m.Budget)
class BudgetAdmin(ReadOnlyAdmin):
    list_display = ("name", "tenant", "unit", "period", "amount", "mode", "active")


@admin.register(m.Window)
class WindowAdmin(ReadOnlyAdmin):
    list_display = ("id", "tenant_id", "budget_id", "unit", "period_start", "used", "held")


@admin.register(m.Slice)
class SliceAdmin(ReadOnlyAdmin):
    list_display = ("id", "tenant_id", "gateway_id", "money", "settled_money", "open", "made_at", "reap_at")


@admin.register(m.Reconciliation)
class ReconciliationAdmin(ReadOnlyAdmin):
    list_display = ("at", "windows", "corrected", "overdue_slices", "quarantined")


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


@admin.register(m.CompiledSheet)
class CompiledSheetAdmin(ReadOnlyAdmin):
    list_display = ("id", "model", "tier", "tenant_id", "effective_from")
    exclude = ("rates",)
