"""The palette (Ctrl K) and its page: what a few typed letters may mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from django.db.models import Q
from django.http import HttpResponse
from django.urls import reverse
from django.utils.http import urlencode

from billing.models import Invoice, Price
from frontend.core.labels import verdict_label
from frontend.core.navigation import sections
from frontend.core.page_context import PageContext, operator_page, tenant_page
from frontend.core.rendering import show
from millrace.apps.records.models import RequestRecord
from millrace.conf.environment import platform_settings
from tenants.models import ApiKey, Tenant, User
from tenants.permissions import Permission

MAX_RESULTS_PER_KIND = 8  # of each kind


@dataclass(frozen=True)
class Hit:
    """One line of the palette."""

    label: str
    url: str
    icon: str
    detail: str = ""
    letter: str = ""


@dataclass(frozen=True)
class Hits:
    """The hits of one kind."""

    kind: str
    hits: tuple[Hit, ...]


Finder = Callable[[PageContext, str], Iterable[Hit]]


def find_keys(visit: PageContext, typed: str) -> Iterable[Hit]:
    """Yield API keys by name or prefix."""
    if not visit.may(Permission.KEYS_READ):
        return
    rows = ApiKey.objects.for_tenant(visit.tenant).filter(Q(name__icontains=typed) | Q(prefix__istartswith=typed))
    for key in rows.order_by("name")[:MAX_RESULTS_PER_KIND]:
        yield Hit(key.name, visit.url("keys-detail", key.pk), "keys", f"{key.prefix}…")


def find_request(visit: PageContext, typed: str) -> Iterable[Hit]:
    """Yield a request by its whole id, as callers have it from `x-request-id`."""
    if typed.startswith("req_") and visit.may(Permission.USAGE_READ):
        for row in RequestRecord.objects.for_tenant(visit.tenant).filter(request_id=typed)[:1]:
            yield Hit(
                row.request_id, visit.url("requests-detail", row.request_id), "requests", verdict_label(row.verdict)
            )


def find_invoices(visit: PageContext, typed: str) -> Iterable[Hit]:
    """Invoices and credit notes by number; an operator's are of every tenant."""
    if not visit.may(Permission.BILLING_READ):
        return
    theirs, name = Invoice.objects, "operator-billing-detail" if visit.access is None else "invoices-detail"
    rows = theirs.all_tenants() if visit.access is None else theirs.for_tenant(visit.tenant)
    found = rows.filter(number__icontains=typed).select_related("tenant").order_by("-pk")
    for row in found[:MAX_RESULTS_PER_KIND]:
        yield Hit(str(row.number), visit.url(name, row.pk), "invoices", row.tenant.name)


def find_tenants(visit: PageContext, typed: str) -> Iterable[Hit]:
    """Tenants by name or slug."""
    rows = Tenant.objects.all_tenants().filter(Q(name__icontains=typed) | Q(slug__istartswith=typed))
    for tenant in rows.order_by("name")[:MAX_RESULTS_PER_KIND]:
        yield Hit(tenant.name, reverse("operator-tenants-detail", args=[tenant.pk]), "tenants", tenant.slug)


def find_users(visit: PageContext, typed: str) -> Iterable[Hit]:
    """Users by name or email address."""
    rows = User.objects.filter(Q(email__icontains=typed) | Q(name__icontains=typed))
    for user in rows.order_by("email")[:MAX_RESULTS_PER_KIND]:
        yield Hit(user.email, reverse("operator-users-detail", args=[user.pk]), "members", user.name)


def find_models(visit: PageContext, typed: str) -> Iterable[Hit]:
    """Yield the models that are served, by name: how busy each is."""
    for spec in platform_settings().models:
        if typed.lower() in spec.name:
            yield Hit(spec.name, f"{reverse('operator-fleet')}?model={spec.name}", "models", "fleet")


def find_prices(visit: PageContext, typed: str) -> Iterable[Hit]:
    """Models that were ever priced."""
    rows = Price.objects.filter(model__icontains=typed).order_by("model")
    for model in rows.values_list("model", flat=True).distinct()[:MAX_RESULTS_PER_KIND]:
        yield Hit(model, f"{reverse('operator-prices')}?{urlencode({'q': model})}", "prices", "prices")


# Finders of things other than screens, called in the visit's scope once something is typed. Screens add finders.
TENANT: dict[str, Finder] = {"API keys": find_keys, "Requests": find_request, "Invoices": find_invoices}
OPERATOR: dict[str, Finder] = {
    "Models": find_models,
    "Tenants": find_tenants,
    "Users": find_users,
    "Prices": find_prices,
    "Invoices": find_invoices,
}


def _found(visit: PageContext) -> tuple[Hits, ...]:
    typed = visit.query.get("q", "").strip()[:100].replace("\0", "")
    links = [link for section in sections(visit) for link in section.links if typed.lower() in link.label.lower()]
    found = [Hits("Pages", tuple(Hit(link.label, link.url, link.icon, letter=link.letter) for link in links))]
    if typed:
        with visit.scope():
            finders = OPERATOR if visit.access is None else TENANT
            found += [
                Hits(kind, tuple(islice(find(visit, typed), MAX_RESULTS_PER_KIND))) for kind, find in finders.items()
            ]
    return tuple(hits for hits in found if hits.hits)


def _search(visit: PageContext) -> HttpResponse:
    template = "frontend/parts/search_results.html" if visit.is_fragment else "frontend/search.html"
    return show(visit, template, "Search", found=_found(visit), typed=visit.query.get("q", ""))


tenant_search = tenant_page()(_search)
operator_search = operator_page()(_search)
