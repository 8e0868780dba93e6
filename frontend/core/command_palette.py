"""The command palette (Ctrl K) and its page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from django.db.models import Q
from django.http import HttpResponse
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from billing.models import Budget, Invoice, Price
from frontend.core.labels import outcome_label
from frontend.core.languages import lazy_text as _lazy
from frontend.core.navigation import sections
from frontend.core.page_context import PageContext, operator_page, tenant_page
from frontend.core.rendering import render_page
from millrace.apps.deployments.deployments import served_specs
from millrace.apps.request_log.selectors import Filters, requests_page
from tenants.models import ApiKey, Project, Tenant, User
from tenants.permissions import Permission

MAX_RESULTS_PER_KIND = 8
_ACTIONS = (
    (_lazy("Create API key"), "keys-new", "plus", Permission.KEYS_WRITE),
    (_lazy("Create project"), "keys-project-new", "plus", Permission.PROJECTS_WRITE),
    (_lazy("Create budget"), "budgets-new", "plus", Permission.LIMITS_WRITE),
    (_lazy("Set rate limits"), "budgets-limits-new", "gauge", Permission.LIMITS_WRITE),
    (_lazy("Create batch"), "batches-new", "plus", Permission.KEYS_WRITE),
    (_lazy("Invite member"), "members-invite", "members", Permission.MEMBERS_WRITE),
    (_lazy("Add webhook endpoint"), "webhooks-new", "webhooks", Permission.WEBHOOKS_WRITE),
    (_lazy("New alert rule"), "alerts-rules-new", "alerts", Permission.LIMITS_WRITE),
    (_lazy("Add Slack channel"), "alerts-slack", "alerts", Permission.WEBHOOKS_WRITE),
    (_lazy("Add PagerDuty service"), "alerts-pagerduty", "alerts", Permission.WEBHOOKS_WRITE),
)


@dataclass(frozen=True)
class SearchResult:
    """One line of the command palette."""

    label: str
    url: str
    icon: str
    detail: str = ""
    letter: str = ""


@dataclass(frozen=True)
class SearchResultGroup:
    """The results of one type."""

    kind: str
    hits: tuple[SearchResult, ...]


Finder = Callable[[PageContext, str], Iterable[SearchResult]]


def find_keys(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield API keys by name or prefix."""
    if not ctx.may(Permission.KEYS_READ):
        return
    rows = ApiKey.objects.for_tenant(ctx.tenant).filter(Q(name__icontains=typed) | Q(prefix__istartswith=typed))
    for key in rows.order_by("name")[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(key.name, ctx.url("keys-detail", key.pk), "keys", f"{key.prefix}…")


def find_projects(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield projects by name or slug."""
    if not ctx.may(Permission.PROJECTS_READ):
        return
    rows = Project.objects.for_tenant(ctx.tenant).filter(Q(name__icontains=typed) | Q(slug__istartswith=typed))
    for row in rows.order_by("name")[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(row.name, ctx.url("projects-detail", row.pk), "layers", row.slug)


def find_requests(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield requests by the beginning of their ID, as in the header `x-request-id`, newest first."""
    if not (typed.startswith("req_") and len(typed) > len("req_") and ctx.may(Permission.USAGE_READ)):
        return
    page = requests_page(Filters(ctx.tenant.pk, id_prefix=typed), size=MAX_RESULTS_PER_KIND)
    for row in page.rows:
        name = row.record.request_id
        yield SearchResult(name, ctx.url("requests-detail", name), "requests", outcome_label(row.record.outcome))


def find_actions(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield actions whose label has every typed word, and the budgets that can be raised."""
    words = typed.lower().split()
    for label, route, icon, needs in _ACTIONS:
        if ctx.may(needs) and all(word in label.lower() for word in words):
            yield SearchResult(label, ctx.url(route), icon)
    if ctx.may(Permission.LIMITS_WRITE) and words and _("raise budget").startswith(words[0]):
        rows = Budget.objects.for_tenant(ctx.tenant).filter(active=True).order_by("name", "pk")
        rest = " ".join(words[1:]).removeprefix("budget").strip()
        for row in rows.filter(name__icontains=rest)[:MAX_RESULTS_PER_KIND]:
            yield SearchResult(_("Raise budget %(name)s") % {"name": row.name}, ctx.url("budgets-raise", row.pk), "up")


def find_invoices(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield invoices and credit notes by number; for operators, those of all tenants."""
    if not ctx.may(Permission.BILLING_READ):
        return
    invoices, name = Invoice.objects, "operator-billing-detail" if ctx.access is None else "invoices-detail"
    rows = invoices.all_tenants() if ctx.access is None else invoices.for_tenant(ctx.tenant)
    found = rows.filter(number__icontains=typed).select_related("tenant").order_by("-pk")
    for row in found[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(str(row.number), ctx.url(name, row.pk), "invoices", row.tenant.name)


def find_tenants(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield tenants by name or slug."""
    rows = Tenant.objects.all_tenants().filter(Q(name__icontains=typed) | Q(slug__istartswith=typed))
    for tenant in rows.order_by("name")[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(tenant.name, reverse("operator-tenants-detail", args=[tenant.pk]), "tenants", tenant.slug)


def find_users(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield users by name or email address."""
    rows = User.objects.filter(Q(email__icontains=typed) | Q(name__icontains=typed))
    for user in rows.order_by("email")[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(user.email, reverse("operator-users-detail", args=[user.pk]), "members", user.name)


def find_models(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield served models by name."""
    for spec in served_specs():
        if typed.lower() in spec.name:
            yield SearchResult(spec.name, f"{reverse('operator-fleet')}?model={spec.name}", "models", "fleet")


def find_prices(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield models that have or had a price."""
    rows = Price.objects.filter(model__icontains=typed).order_by("model")
    for model in rows.values_list("model", flat=True).distinct()[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(model, f"{reverse('operator-prices')}?{urlencode({'q': model})}", "prices", _("prices"))


# Finders by group, called inside `ctx.scope()` with the typed text.
TENANT: dict[str, Finder] = {
    _lazy("Actions"): find_actions,
    _lazy("API keys"): find_keys,
    _lazy("Projects"): find_projects,
    _lazy("Requests"): find_requests,
    _lazy("Invoices"): find_invoices,
}
OPERATOR: dict[str, Finder] = {
    _lazy("Models"): find_models,
    _lazy("Tenants"): find_tenants,
    _lazy("Users"): find_users,
    _lazy("Prices"): find_prices,
    _lazy("Invoices"): find_invoices,
}


def _results(ctx: PageContext) -> tuple[SearchResultGroup, ...]:
    typed = ctx.query.get("q", "").strip()[:100]
    links = [link for section in sections(ctx) for link in section.links if typed.lower() in link.label.lower()]
    found = [
        SearchResultGroup(
            _("Pages"), tuple(SearchResult(link.label, link.url, link.icon, letter=link.letter) for link in links)
        )
    ]
    if typed:
        with ctx.scope():
            finders = OPERATOR if ctx.access is None else TENANT
            found += [
                SearchResultGroup(str(kind), tuple(islice(find(ctx, typed), MAX_RESULTS_PER_KIND)))
                for kind, find in finders.items()
            ]
    return tuple(hits for hits in found if hits.hits)


def _search(ctx: PageContext) -> HttpResponse:
    template = "frontend/parts/search_results.html" if ctx.is_fragment else "frontend/search.html"
    return render_page(ctx, template, _("Search"), found=_results(ctx), typed=ctx.query.get("q", ""))


tenant_search = tenant_page()(_search)
operator_search = operator_page()(_search)
