"""URLs of invoices and the ledger, below /api/."""

from __future__ import annotations

from django.urls import path

from billing.api import alerts, budgets, invoices, money, operators, reconciliation

urlpatterns = [
    path("budgets", budgets.Budgets.as_view(), name="api-budgets"),
    path("budgets/<int:pk>", budgets.BudgetDetail.as_view(), name="api-budget"),
    path("budgets/<int:pk>/alerts", alerts.BudgetAlerts.as_view(), name="api-budget-alerts"),
    path("budgets/<int:pk>/forecast", alerts.BudgetForecast.as_view(), name="api-budget-forecast"),
    path("alerts", alerts.Alerts.as_view(), name="api-alerts"),
    path("forecast", alerts.TenantForecast.as_view(), name="api-forecast"),
    path("invoices", invoices.Invoices.as_view(), name="api-invoices"),
    path("invoices/<int:pk>", invoices.InvoiceDetail.as_view(), name="api-invoice"),
    path("invoices/<int:pk>/pdf", invoices.InvoicePdf.as_view(), name="api-invoice-pdf"),
    path("invoices/<int:pk>/html", invoices.InvoiceHtml.as_view(), name="api-invoice-html"),
    path("invoices/<int:pk>/csv", invoices.InvoiceCsv.as_view(), name="api-invoice-csv"),
    path("invoices/<int:pk>/events", invoices.InvoiceEvents.as_view(), name="api-invoice-events"),
    path("invoices/<int:pk>/check", invoices.InvoiceCheck.as_view(), name="api-invoice-check"),
    path("billing/profile", money.Profile.as_view(), name="api-billing-profile"),
    path("credits", money.Credits.as_view(), name="api-credits"),
    path("commitments", money.Commitments.as_view(), name="api-commitments"),
    path("payments", money.Payments.as_view(), name="api-payments"),
    path("ledger", money.Ledger.as_view(), name="api-ledger"),
    path("webhooks/payments/<slug:provider>", money.PaymentWebhook.as_view(), name="api-payment-webhook"),
    path("operator/reconciliation", reconciliation.ReconciliationView.as_view(), name="api-operator-reconciliation"),
    path("operator/entities", operators.Entities.as_view(), name="api-operator-entities"),
    path("operator/entities/<int:pk>", operators.EntityOne.as_view(), name="api-operator-entity"),
    path("operator/tax-rules", operators.TaxRules.as_view(), name="api-operator-tax-rules"),
    path("operator/exchange-rates", operators.ExchangeRates.as_view(), name="api-operator-exchange-rates"),
    path("operator/payment-events", operators.PaymentEvents.as_view(), name="api-operator-payment-events"),
    path("operator/periods", operators.Periods.as_view(), name="api-operator-periods"),
    path("operator/periods/<int:pk>/close", operators.PeriodClose.as_view(), name="api-operator-period-close"),
    path("operator/tenants/<int:pk>/invoices", operators.TenantInvoices.as_view(), name="api-operator-tenant-invoices"),
    path("operator/tenants/<int:pk>/credits", operators.TenantCredits.as_view(), name="api-operator-tenant-credits"),
    path(
        "operator/tenants/<int:pk>/commitments",
        operators.TenantCommitments.as_view(),
        name="api-operator-tenant-commitments",
    ),
    path("operator/tenants/<int:pk>/payments", operators.TenantPayments.as_view(), name="api-operator-tenant-payments"),
    path("operator/tenants/<int:pk>/entity", operators.TenantEntity.as_view(), name="api-operator-tenant-entity"),
    path(
        "operator/invoices/<int:pk>/finalize", operators.InvoiceFinalize.as_view(), name="api-operator-invoice-finalize"
    ),
    path(
        "operator/invoices/<int:pk>/credit", operators.InvoiceCreditNotes.as_view(), name="api-operator-invoice-credit"
    ),
    *(
        path(
            f"operator/invoices/<int:pk>/{fate}",
            operators.InvoiceFate.as_view(fate=fate),
            name=f"api-operator-invoice-{fate}",
        )
        for fate in operators.FATES
    ),
]
