"""Every URL of the console and the management API, with arguments that name rows of a tenant."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.frontend.console import SLUGS, THEIRS, World, load_screens
from tests.support.rows import unscoped

if TYPE_CHECKING:
    from django.urls import URLPattern

load_screens()  # before the world is created
# Arguments of URLs whose rows have another name, and arguments that are no rows.
_ROWS = {"version": "price_version", "token": "invitation_token", "commitment": "tenant_commitment"}
_NAMES = {
    "billing_entity": "default",
    "report_name": "vat",
    "report_period": "2026-10",
    "check_id": "none",
    "file_format": "csv",
    "pk": "1",
    "source": "openai",
    "model": "smollm2-135m",
    "provider": "stripe",
    "provider_id": "sso",
    "worker": "smollm2-135m-int8-0.bb",
}
_ARGUMENT = re.compile(r"<(?:\w+:)?(\w+)>|\(\?P<(\w+)>[^)]*\)")


@dataclass(frozen=True)
class Route:
    """One URL pattern of the resolver. `panel` is the name of the panel that it refreshes, if it refreshes panels.

    `is_on_page`: the page shows the panel without this request.
    """

    pattern: str
    name: str
    view: Callable[..., Any]
    panel: str = ""
    is_on_page: bool = False

    @property
    def is_of_tenant(self) -> bool:
        """True for pages and operations of one tenant, as opposed to those of operators and of a user's account."""
        return self.pattern.startswith("t/") or (self.is_api and not self.pattern.startswith("api/operator/"))

    @property
    def is_api(self) -> bool:
        return self.pattern.startswith("api/")

    def address(self, world: World, state: str, **arguments: str) -> str:
        """Return the URL for the rows of the tenant of this state. A row that it lacks is that of `populated`."""

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            return arguments.get(name) or str(_argument(self, name, world, state))

        return "/" + _ARGUMENT.sub(value, self.pattern.replace("^", "").replace("$", ""))

    def __str__(self) -> str:
        return f"{self.pattern} ({self.panel})" if self.panel else self.pattern


def all_routes() -> list[Route]:
    """Return the routes of the platform, one for each panel of a screen. Of equal patterns, the first one is served."""
    from django.urls import get_resolver  # here: Django is not set up on import

    found: dict[str, Route] = {}
    for pattern, entry in _patterns(get_resolver().url_patterns):
        owner = getattr(inspect.unwrap(entry.callback), "__self__", None)
        panels = getattr(owner, "_panels", {})
        for panel in panels or ("",):
            is_on_page = panel in panels and not panels[panel].lazy
            route = Route(pattern, entry.name or "", entry.callback, panel, is_on_page)
            found.setdefault(str(route), route)
    return list(found.values())


def _patterns(entries: list[Any], prefix: str = "") -> Iterator[tuple[str, URLPattern]]:
    for entry in entries:
        pattern = prefix + str(entry.pattern)
        if hasattr(entry, "url_patterns"):
            yield from _patterns(entry.url_patterns, pattern)
        else:
            yield pattern, entry


def _argument(route: Route, name: str, world: World, state: str) -> object:
    """Return the value of one argument."""
    if name == "panel":
        return route.panel
    if name == "slug" or (name == "tenant" and "<slug:tenant>" in route.pattern):
        return SLUGS[state]
    if name in ("pk", "name") and (key := _row_of(route, world, state)) is not None:
        return key
    if name in ("uidb36", "key") and "uidb36" in route.pattern:
        user, _, key = world.rows["populated.reset_key"].partition("-")
        return user if name == "uidb36" else key
    if name == "project":
        return world.projects[state].pk
    for row in (f"{state}.{_ROWS.get(name, name)}", f"populated.{_ROWS.get(name, name)}"):
        if row in world.rows:
            return world.rows[row]
    return _NAMES.get(name) or THEIRS[name](world)


def _row_of(route: Route, world: World, state: str) -> object:
    """Return the key of the newest row of the route's table, of this tenant if the table has tenants; None without."""
    for prefix, model in _tables().items():
        if route.pattern.startswith(prefix):
            fields = {field.name: field for field in model._meta.concrete_fields}
            owner = next((name for name in ("tenant", "tenant_id") if name in fields), "")
            mine = {owner: world.tenants[state].pk} if owner and model.__name__ != "PriceVersion" else {}
            rows = unscoped(model).filter(**mine)
            column = "name" if "<str:name>" in route.pattern else "pk"
            if column == "name" and "request_id" in fields:
                column = "request_id"
            return getattr(rows[-1], column) if rows else 0
    return None


def _tables() -> Mapping[str, Any]:
    """Return the tables whose rows the last argument of a URL names, by the URL's start."""
    from billing import models as billing  # here: Django is not set up on import
    from millrace.apps.alerts.models import AlertRule, RuleAlert
    from millrace.apps.deployments.models import Deployment
    from millrace.apps.request_log.models import RequestRecord
    from tenants import models as tenants

    return {
        "api/alert-rules/": AlertRule,
        "api/audit/": tenants.AuditEntry,
        "api/budgets/": billing.Budget,
        "api/experiments/": tenants.Experiment,
        "api/invitations/": tenants.Invitation,
        "api/invoices/": billing.Invoice,
        "api/keys/": tenants.ApiKey,
        "api/limits/": tenants.LimitSet,
        "api/members/": tenants.Membership,
        "api/payments/": billing.Payment,
        "api/operator/bank-entries/": billing.BankEntry,
        "api/operator/deployments/": Deployment,
        "api/operator/entities/": billing.BillingEntity,
        "api/operator/invoices/": billing.Invoice,
        "api/operator/one-off-lines/": billing.OneOffLine,
        "api/operator/payment-events/": billing.PaymentEvent,
        "api/operator/payments/": billing.Payment,
        "api/operator/periods/": billing.Period,
        "api/operator/price-terms/": billing.PriceTerm,
        "api/operator/prices/": billing.PriceVersion,
        "api/operator/reratings/": billing.Rerating,
        "api/operator/tenants/": tenants.Tenant,
        "api/operator/upstream-credentials/": tenants.UpstreamCredential,
        "api/operator/users/": tenants.User,
        "api/policies/": tenants.RoutingPolicy,
        "api/policy-drafts/": tenants.RoutingPolicyDraft,
        "api/projects/": tenants.Project,
        "api/requests/": RequestRecord,
        "api/rule-alerts/": RuleAlert,
        "api/upstream-credentials/": tenants.UpstreamCredential,
        "api/webhook-deliveries/": tenants.WebhookDelivery,
        "api/webhook-events/": tenants.WebhookEvent,
        "api/webhook-listeners/": tenants.WebhookEndpoint,
        "api/webhooks/": tenants.WebhookEndpoint,
        "operator/audit/": tenants.AuditEntry,
        "operator/deployments/": Deployment,
        "operator/quarantine/": billing.UsageQuarantine,
        "t/<slug:slug>/requests/": RequestRecord,
    }
