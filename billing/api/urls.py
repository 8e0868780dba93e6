"""URLs of billing in the management API, below /api/."""

from __future__ import annotations

from django.urls import path

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
    path("invoices/<int:pk>/xml", invoices.InvoiceXml.as_view(), name="api-invoice-xml"),
    path("invoices/<int:pk>/html", invoices.InvoiceHtml.as_view(), name="api-invoice-html"),
    path("invoices/<int:pk>/csv", invoices.InvoiceCsv.as_view(), name="api-invoice-csv"),
    path("invoices/<int:pk>/events", invoices.InvoiceEvents.as_view(), name="api-invoice-events"),
    path("invoices/<int:pk>/check", invoices.InvoiceCheck.as_view(), name="api-invoice-check"),
    path("invoices/<int:pk>/pay", money.InvoicePayment.as_view(), name="api-invoice-pay"),
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
    path("operator/entities/<int:pk>/journal", accounting.EntityJournal.as_view(), name="api-operator-entity-journal"),
    path("operator/entities/<int:pk>/chart", accounting.EntityChart.as_view(), name="api-operator-entity-chart"),
    path(
        "operator/entities/<int:pk>/trial-balance",
        accounting.EntityTrialBalance.as_view(),
        name="api-operator-entity-trial-balance",
    ),
    path(
        "operator/entities/<int:pk>/prepaid-credit",
        accounting.EntityPrepaidCredit.as_view(),
        name="api-operator-entity-prepaid-credit",
    ),
    path("operator/entities/<int:pk>/aging", receivables.EntityAging.as_view(), name="api-operator-entity-aging"),
    *(
        path(f"operator/entities/<int:pk>/{name}", view.as_view(), name=f"api-operator-entity-{name}")
        for name, view in vat_reports.VIEWS.items()
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
    path(
        "operator/bank-entries/<int:pk>/assign", bank.BankEntryAssign.as_view(), name="api-operator-bank-entry-assign"
    ),
    path(
        "operator/bank-entries/<int:pk>/dismiss",
        bank.BankEntryDismiss.as_view(),
        name="api-operator-bank-entry-dismiss",
    ),
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
    *(
        path(
            f"operator/tenants/<int:pk>/statement{ending}", view.as_view(), name=f"api-operator-tenant-statement{name}"
        )
        for ending, name, view in (
            ("", "", receivables.OperatorStatement),
            ("/csv", "-csv", receivables.OperatorStatementCsv),
            ("/pdf", "-pdf", receivables.OperatorStatementPdf),
        )
    ),
    path(
        "operator/payments/<int:pk>/receipt",
        receivables.OperatorPaymentReceipt.as_view(),
        name="api-operator-payment-receipt",
    ),
    path("operator/tenants/<int:pk>/prepaid", operators.TenantPrepaid.as_view(), name="api-operator-tenant-prepaid"),
    path(
        "operator/payment-events/<int:pk>/dismiss",
        operators.PaymentEventDismiss.as_view(),
        name="api-operator-payment-event-dismiss",
    ),
    path("operator/tenants/<int:pk>/entity", operators.TenantEntity.as_view(), name="api-operator-tenant-entity"),
    path(
        "operator/invoices/<int:pk>/finalize", operators.InvoiceFinalize.as_view(), name="api-operator-invoice-finalize"
    ),
    path(
        "operator/invoices/<int:pk>/credit", operators.InvoiceCreditNotes.as_view(), name="api-operator-invoice-credit"
    ),
    path("operator/invoices/<int:pk>/debit", reratings.InvoiceDebitNotes.as_view(), name="api-operator-invoice-debit"),
    path(
        "operator/tenants/<int:pk>/one-off-lines",
        reratings.TenantOneOffLines.as_view(),
        name="api-operator-tenant-one-off-lines",
    ),
    path(
        "operator/tenants/<int:pk>/price-terms",
        price_terms.TenantPriceTerms.as_view(),
        name="api-operator-tenant-price-terms",
    ),
    path(
        "operator/tenants/<int:pk>/metered-usage",
        price_terms.TenantMeteredUsage.as_view(),
        name="api-operator-tenant-metered-usage",
    ),
    path("operator/commitments/<int:pk>/end", operators.CommitmentEnd.as_view(), name="api-operator-commitment-end"),
    path(
        "operator/metered-usage/<int:pk>/reverse",
        price_terms.MeteredUsageReverse.as_view(),
        name="api-operator-metered-usage-reverse",
    ),
    path("operator/price-terms/<int:pk>/end", price_terms.PriceTermEnd.as_view(), name="api-operator-price-term-end"),
    path(
        "operator/one-off-lines/<int:pk>/end", reratings.OneOffLineEnd.as_view(), name="api-operator-one-off-line-end"
    ),
    path("operator/one-off-lines/<int:pk>", reratings.OneOffLineOne.as_view(), name="api-operator-one-off-line"),
    path("operator/reratings", reratings.Reratings.as_view(), name="api-operator-reratings"),
    path("operator/reratings/<int:pk>", reratings.ReratingOne.as_view(), name="api-operator-rerating"),
    path(
        "operator/reratings/<int:pk>/preview",
        reratings.ReratingPreview.as_view(),
        name="api-operator-rerating-preview",
    ),
    *(
        path(
            f"operator/reratings/<int:pk>/{action}",
            reratings.ReratingActionView.as_view(action_name=action),
            name=f"api-operator-rerating-{action}",
        )
        for action in reratings.ACTIONS
    ),
    *(
        path(
            f"operator/invoices/<int:pk>/{action}",
            operators.InvoiceActionView.as_view(action_name=action),
            name=f"api-operator-invoice-{action}",
        )
        for action in operators.ACTIONS
    ),
    path("prices", prices.Prices.as_view(), name="api-prices"),
    path("operator/prices", prices.PriceVersions.as_view(), name="api-operator-prices"),
    path("operator/prices/import", prices.PriceImport.as_view(), name="api-operator-prices-import"),
    path("operator/prices/<int:pk>", prices.PriceVersionOne.as_view(), name="api-operator-prices-detail"),
    path("operator/prices/<int:pk>/preview", prices.PricePreview.as_view(), name="api-operator-prices-preview"),
    *(
        path(
            f"operator/prices/<int:pk>/{action}",
            prices.PriceVersionActionView.as_view(action_name=action),
            name=f"api-operator-prices-{action}",
        )
        for action in prices.ACTIONS
    ),
    path("operator/tenants/<int:pk>/price-book", prices.TenantBook.as_view(), name="api-operator-tenant-price-book"),
    path("usage", usage.UsageView.as_view(), name="api-usage"),
    path("usage/events", usage.UsageEventsView.as_view(), name="api-usage-events"),
]
