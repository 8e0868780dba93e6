"""The costs of requests to the console and the management API, in units of a simple request.

Requests with a cost above 1 are expensive: they run one at a time for each caller and tenant
(`millrace.conf.request_slots`).
"""

from __future__ import annotations

from collections.abc import Mapping

from django.urls import Resolver404, resolve

SCREEN, REPORT, HEAVY = 2, 10, 30
# By URL name. All others cost 1.
COSTS: Mapping[str, int] = {
    **dict.fromkeys(
        (
            *("alerts", "alerts-rules-new", "api-forecast", "api-policy-validate", "api-requests", "api-usage-events"),
            *("batches-new", "budgets-limits-new", "budgets-limits-try", "budgets-new", "budgets-try", "invoices"),
            *("invoices-upcoming", "keys", "keys-detail", "overview", "overview-panel", "playground"),
            *("projects-detail", "requests", "requests-panel", "routing-check", "routing-edit", "usage"),
            "usage-panel",
        ),
        SCREEN,
    ),
    **dict.fromkeys(
        (
            *("api-cache-warming", "api-experiment-results", "api-invoice-csv", "api-invoice-html", "api-invoice-pdf"),
            *("api-operator-execution-costs", "api-operator-margins", "api-policy-shadow-results"),
            *("api-requests-cache-layers", "api-requests-prompt-advice", "api-requests-rates", "api-requests-success"),
            *("api-usage", "alerts-export", "audit-export", "batches-export"),
            *("batches-files-export", "invoices-export", "keys-export", "members-export", "operator-audit-export"),
            *("operator-billing-export", "operator-margin-csv", "operator-prices-csv", "operator-tenants-export"),
            *("operator-users-export", "requests-export", "schema", "usage-csv", "usage-success-csv"),
            "webhooks-export",
        ),
        REPORT,
    ),
    **dict.fromkeys(
        (
            *("api-cache-warming-run", "api-invoice-check", "api-operator-prices-preview", "api-operator-costs-import"),
            *("api-operator-prices-import", "api-operator-provider-exports", "api-operator-rerating-preview"),
            *("api-policy-dry-run", "api-requests-outcomes"),
        ),
        HEAVY,
    ),
}


def cost_of(path: str) -> int:
    """Return the cost of a request to this path."""
    try:
        return COSTS.get(resolve(path).url_name or "", 1)
    except Resolver404:
        return 1
