"""URLs of billing in the management API, below /api/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.urls import URLPattern, path
from rest_framework.views import APIView

from billing.api import (
    accounting,
    alerts,
    bank,
    budgets,
    costs,
    invoices,
    money,
    operators,
    price_terms,
    prices,
    receivables,
    reconciliation,
    reratings,
    usage,
    vat_reports,
)


def _make_paths(prefix: str, name: str, views: Mapping[str, type[APIView]]) -> list[URLPattern]:
    """Return the URLs of views below a prefix, by the rest of the URL. Their names start with `name`."""
    return [
        path(f"{prefix}/{rest}", view.as_view(), name=f"{name}-{rest.replace('/', '-')}")
        for rest, view in views.items()
    ]


def _make_action_paths(prefix: str, name: str, view: type[APIView], actions: Iterable[str]) -> list[URLPattern]:
    """Return a URL for each action on a row, whose name the view has as `action_name`."""
    return [
        path(f"{prefix}/<int:pk>/{action}", view.as_view(action_name=action), name=f"{name}-{action}")
        for action in actions
    ]


urlpatterns = [
    path("budgets", budgets.Budgets.as_view(), name="api-budgets"),
    path("budgets/<int:pk>", budgets.BudgetDetail.as_view(), name="api-budget"),
    *_make_paths("budgets/<int:pk>", "api-budget", {"alerts": alerts.BudgetAlerts, "forecast": alerts.BudgetForecast}),
    path("alerts", alerts.Alerts.as_view(), name="api-alerts"),
    path("forecast", alerts.TenantForecast.as_view(), name="api-forecast"),
    path("invoices", invoices.Invoices.as_view(), name="api-invoices"),
    path("invoices/<int:pk>", invoices.InvoiceDetail.as_view(), name="api-invoice"),
    *_make_paths(
        "invoices/<int:pk>",
        "api-invoice",
        {
            "pdf": invoices.InvoicePdf,
            "xml": invoices.InvoiceXml,
            "html": invoices.InvoiceHtml,
            "csv": invoices.InvoiceCsv,
            "events": invoices.InvoiceEvents,
            "check": invoices.InvoiceCheck,
            "pay": money.InvoicePayment,
        },
    ),
    path("billing/top-ups", money.TopUps.as_view(), name="api-top-ups"),
    path("billing/statement", receivables.TenantStatement.as_view(), name="api-statement"),
    path("billing/statement/csv", receivables.TenantStatementCsv.as_view(), name="api-statement-csv"),
    path("billing/statement/pdf", receivables.TenantStatementPdf.as_view(), name="api-statement-pdf"),
    path("billing/currency", money.Currency.as_view(), name="api-billing-currency"),
    path("billing/profile", money.Profile.as_view(), name="api-billing-profile"),
    path("credits", money.Credits.as_view(), name="api-credits"),
    path("commitments", money.Commitments.as_view(), name="api-commitments"),
    path("payments", money.Payments.as_view(), name="api-payments"),
    path("payments/<int:pk>", receivables.PaymentOne.as_view(), name="api-payment"),
    path("payments/<int:pk>/receipt", receivables.PaymentReceipt.as_view(), name="api-payment-receipt"),
    path("ledger", money.Ledger.as_view(), name="api-ledger"),
    path("webhooks/payments/<slug:provider>", money.PaymentWebhook.as_view(), name="api-payment-webhook"),
    path("operator/reconciliation", reconciliation.ReconciliationView.as_view(), name="api-operator-reconciliation"),
    path("operator/costs", costs.CostCardsView.as_view(), name="api-operator-costs"),
    path("operator/costs/import", costs.CostImport.as_view(), name="api-operator-costs-import"),
    path("operator/costs/executions", costs.ExecutionCosts.as_view(), name="api-operator-execution-costs"),
    path("operator/margins", costs.Margins.as_view(), name="api-operator-margins"),
    path("operator/spend", costs.Spend.as_view(), name="api-operator-spend"),
    path("operator/provider-exports", costs.ProviderExports.as_view(), name="api-operator-provider-exports"),
    path("operator/entities", operators.Entities.as_view(), name="api-operator-entities"),
    path("operator/entities/<int:pk>", operators.EntityOne.as_view(), name="api-operator-entity"),
    *_make_paths(
        "operator/entities/<int:pk>",
        "api-operator-entity",
        {
            "journal": accounting.EntityJournal,
            "chart": accounting.EntityChart,
            "trial-balance": accounting.EntityTrialBalance,
            "prepaid-credit": accounting.EntityPrepaidCredit,
            "aging": receivables.EntityAging,
            **vat_reports.VIEWS,
        },
    ),
    path("operator/tax-rules", operators.TaxRules.as_view(), name="api-operator-tax-rules"),
    path("operator/exchange-rates", operators.ExchangeRates.as_view(), name="api-operator-exchange-rates"),
    path(
        "operator/exchange-rates/import",
        operators.ExchangeRateImport.as_view(),
        name="api-operator-exchange-rates-import",
    ),
    path("operator/payments/import", bank.PaymentFileImport.as_view(), name="api-operator-payments-import"),
    path("operator/bank-statements", bank.BankStatements.as_view(), name="api-operator-bank-statements"),
    path("operator/bank-entries", bank.BankEntries.as_view(), name="api-operator-bank-entries"),
    *_make_paths(
        "operator/bank-entries/<int:pk>",
        "api-operator-bank-entry",
        {"assign": bank.BankEntryAssign, "dismiss": bank.BankEntryDismiss},
    ),
    path("operator/payment-events", operators.PaymentEvents.as_view(), name="api-operator-payment-events"),
    path("operator/periods", operators.Periods.as_view(), name="api-operator-periods"),
    path("operator/periods/<int:pk>/close", operators.PeriodClose.as_view(), name="api-operator-period-close"),
    *_make_paths(
        "operator/tenants/<int:pk>",
        "api-operator-tenant",
        {
            "invoices": operators.TenantInvoices,
            "credits": operators.TenantCredits,
            "commitments": operators.TenantCommitments,
            "payments": operators.TenantPayments,
            "statement": receivables.OperatorStatement,
            "statement/csv": receivables.OperatorStatementCsv,
            "statement/pdf": receivables.OperatorStatementPdf,
            "prepaid": operators.TenantPrepaid,
            "entity": operators.TenantEntity,
            "one-off-lines": reratings.TenantOneOffLines,
            "price-terms": price_terms.TenantPriceTerms,
            "metered-usage": price_terms.TenantMeteredUsage,
            "price-book": prices.TenantBook,
        },
    ),
    *_make_paths("operator/payments/<int:pk>", "api-operator-payment", {"receipt": receivables.OperatorPaymentReceipt}),
    *_make_paths(
        "operator/payment-events/<int:pk>", "api-operator-payment-event", {"dismiss": operators.PaymentEventDismiss}
    ),
    *_make_paths(
        "operator/invoices/<int:pk>",
        "api-operator-invoice",
        {
            "finalize": operators.InvoiceFinalize,
            "credit": operators.InvoiceCreditNotes,
            "debit": reratings.InvoiceDebitNotes,
        },
    ),
    *_make_action_paths("operator/invoices", "api-operator-invoice", operators.InvoiceActionView, operators.ACTIONS),
    *_make_paths("operator/commitments/<int:pk>", "api-operator-commitment", {"end": operators.CommitmentEnd}),
    *_make_paths(
        "operator/metered-usage/<int:pk>", "api-operator-metered-usage", {"reverse": price_terms.MeteredUsageReverse}
    ),
    *_make_paths("operator/price-terms/<int:pk>", "api-operator-price-term", {"end": price_terms.PriceTermEnd}),
    path("operator/one-off-lines/<int:pk>", reratings.OneOffLineOne.as_view(), name="api-operator-one-off-line"),
    *_make_paths("operator/one-off-lines/<int:pk>", "api-operator-one-off-line", {"end": reratings.OneOffLineEnd}),
    path("operator/reratings", reratings.Reratings.as_view(), name="api-operator-reratings"),
    path("operator/reratings/<int:pk>", reratings.ReratingOne.as_view(), name="api-operator-rerating"),
    *_make_paths("operator/reratings/<int:pk>", "api-operator-rerating", {"preview": reratings.ReratingPreview}),
    *_make_action_paths("operator/reratings", "api-operator-rerating", reratings.ReratingActionView, reratings.ACTIONS),
    path("prices", prices.Prices.as_view(), name="api-prices"),
    path("operator/prices", prices.PriceVersions.as_view(), name="api-operator-prices"),
    path("operator/prices/import", prices.PriceImport.as_view(), name="api-operator-prices-import"),
    path("operator/prices/<int:pk>", prices.PriceVersionOne.as_view(), name="api-operator-prices-detail"),
    *_make_paths(
        "operator/prices/<int:pk>",
        "api-operator-prices",
        {
            "preview": prices.PricePreview,
            "projection": prices.PriceProjection,
            "publish-as-sole-operator": prices.SoleOperatorPublication,
        },
    ),
    *_make_action_paths("operator/prices", "api-operator-prices", prices.PriceVersionActionView, prices.ACTIONS),
    path("usage", usage.UsageView.as_view(), name="api-usage"),
    path("usage/events", usage.UsageEventsView.as_view(), name="api-usage-events"),
]
