"""The costs of requests to the console and the management API, in units of a simple request.

Requests with a cost above 1 are expensive: they run one at a time for each caller and tenant
(`millrace.conf.request_slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.urls import Resolver404, resolve

from tenants.request_costs import HEAVY_COST, PAGE_COST, REPORT_COST, SIMPLE_COST

# Of the management API, by URL name; all others cost 1. A page of the console declares its cost (`tenant_page`).
COSTS: Mapping[str, int] = {
    **dict.fromkeys(("api-forecast", "api-policy-validate", "api-requests", "api-usage-events"), PAGE_COST),
    **dict.fromkeys(
        (
            *("api-cache-warming", "api-cache-warming-candidates", "api-experiment-results", "api-invoice-csv"),
            *("api-invoice-html", "api-invoice-pdf"),
            *("api-operator-entity-aging", "api-operator-payment-receipt", "api-operator-tenant-statement"),
            *("api-operator-tenant-statement-csv", "api-operator-tenant-statement-pdf", "api-payment-receipt"),
            *("api-statement", "api-statement-csv", "api-statement-pdf"),
            *("api-invoice-xml", "api-operator-entity-ec-sales", "api-operator-entity-oss", "api-operator-entity-vat"),
            *("api-operator-entity-prepaid-credit", "api-operator-entity-trial-balance"),
            *("api-operator-execution-costs", "api-operator-margins", "api-policy-shadow-results"),
            *("api-requests-cache-layers", "api-requests-prompt-advice", "api-requests-rates", "api-requests-success"),
            *("api-usage", "schema"),
        ),
        REPORT_COST,
    ),
    **dict.fromkeys(
        (
            *("api-cache-warming-run", "api-invoice-check", "api-operator-prices-preview", "api-operator-costs-import"),
            *("api-operator-payments-import",),
            *("api-operator-prices-import", "api-operator-provider-exports", "api-operator-rerating-preview"),
            *("api-policy-dry-run", "api-requests-outcomes"),
        ),
        HEAVY_COST,
    ),
}


def cost_of(path: str) -> int:
    """Return the cost of a request to this path."""
    try:
        match = resolve(path)
    except Resolver404:
        return SIMPLE_COST
    return cost_of_view(match.func, match.url_name or "")


def cost_of_view(view: Callable[..., Any], name: str) -> int:
    """Return the cost of a request to a view, which has it as attribute or by its URL name."""
    cost: int = getattr(view, "request_cost", COSTS.get(name, SIMPLE_COST))
    return cost
