"""Screens of billing runs. The invoices are those of the tenants' screen."""

from __future__ import annotations

from typing import Any

from tests.support.frontend.console import Screen, register

ONE = "/operator/billing/{invoice}"


def _period(tenant: Any) -> int:
    from billing.models import Invoice

    return Invoice.objects.for_tenant(tenant).order_by("-pk").values_list("period_id", flat=True)[0]


def _draft(tenant: Any) -> int:
    """Return a draft of any tenant, since the tenant of the screenshots has none."""
    from billing.models import Invoice
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    with all_tenants_scope(BypassReason.COMMAND):
        return Invoice.objects.all_tenants().filter(state="draft", complete=True).values_list("pk", flat=True)[0]


def _form(name: str, url: str) -> Screen:
    return Screen(f"operator-billing-{name}", url, 24, who="operator", states=("populated",))


register(
    Screen("operator-billing", "/operator/billing/", queries=56, who="operator", states=("populated", "error")),
    Screen("operator-billing-detail", ONE, queries=40, who="operator", states=("populated", "over", "error")),
    Screen("operator-billing-line", f"{ONE}/lines/1", queries=24, who="operator", states=("populated",)),
    _form("draft", "/operator/billing/months/{period}/draft"),
    _form("finalize-all", "/operator/billing/months/{period}/finalize"),
    _form("finalize", "/operator/billing/{draft}/finalize"),
    _form("payment", f"{ONE}/payment"),
    _form("credit-note", f"{ONE}/credit-note"),
    _form("debit-note", f"{ONE}/debit-note"),
    _form("void", f"{ONE}/void"),
    _form("write-off", f"{ONE}/write-off"),
    _form("claim-tax-relief", f"{ONE}/claim-tax-relief"),
    _form("credit", "/operator/billing/tenants/{slug}/credit"),
    _form("tenant-payment", "/operator/billing/tenants/{slug}/payment"),
    _form("statement", "/operator/billing/tenants/{slug}/statement"),
    demo={"period": _period, "draft": _draft},
)
