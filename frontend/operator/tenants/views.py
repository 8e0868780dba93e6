"""All tenants, one of them, what operators do to it, and viewing its console."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.http import Http404, HttpResponse
from django.urls import path
from django.utils.http import url_has_allowed_host_and_scheme

from billing.actions.budgets import do_change_budget
from billing.actions.prices import do_assign_book
from billing.models import BookAssignment, Budget, PriceBook
from frontend.core import impersonation
from frontend.core.confirmation import Confirm
from frontend.core.form_view import ask, posted
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import carry_out, done, refused, show
from frontend.operator.tenants import detail, forms, page
from frontend.tenant.budgets.effect import effect_of
from millrace.conf.environment import platform_settings
from tenants import actions, invitations
from tenants.models import Invitation, Membership, Tenant

T = TypeVar("T")
LIST = Panels(
    "operator-tenants-panel",
    (
        Panel("stats", "All tenants", "operator/tenants/stats.html", page.figures, every=60),
        Panel("list", "Tenants", "operator/tenants/list.html", page.listed, every=60),
    ),
)
ONE = Panels(
    "operator-tenants-detail-panel",
    (
        Panel("stats", "Figures", "operator/tenants/detail_stats.html", detail.figures),
        Panel("spend", "Spend by day", "operator/tenants/spend.html", detail.spend, every=0),
        Panel("plan", "Plan", "operator/tenants/plan.html", detail.plan, every=0),
        Panel("limits", "Budgets and limits", "operator/tenants/limits.html", detail.bounds),
        Panel("members", "Members", "operator/tenants/members.html", detail.people, every=0),
        Panel("credits", "Credits", "operator/tenants/credits.html", detail.credits, every=0),
        Panel("invoices", "Invoices", "operator/tenants/invoices.html", detail.invoices, every=0),
        Panel("quarantine", "Quarantine", "operator/tenants/quarantine.html", detail.quarantine),
        Panel("changes", "Latest changes", "operator/tenants/changes.html", detail.log),
    ),
)


@operator_page()
def tenants(visit: PageContext) -> HttpResponse:
    given: dict[str, Any] = {
        "fields": page.fields(visit),
        "metering": metering(visit.now),
        "new_url": visit.url("operator-tenants-new"),
    }
    return show(visit, "operator/tenants/page.html", "Tenants", panels=LIST, **given)


@operator_page()
def tenant(visit: PageContext) -> HttpResponse:
    with visit.scope():
        head = detail.head(visit)
    breadcrumbs, told = (_tenants(visit),), metering(visit.now)
    return show(
        visit,
        "operator/tenants/detail.html",
        head.tenant.name,
        panels=ONE,
        breadcrumbs=breadcrumbs,
        head=head,
        metering=told,
    )


@operator_page(methods=FORM, step_up=True)
def new(visit: PageContext) -> HttpResponse:
    form = forms.NewTenant(posted(visit))
    back = visit.url("operator-tenants")
    given: dict[str, Any] = {"action": visit.request.path, "submit": "Create tenant", "back": back}
    given["breadcrumbs"] = (_tenants(visit),)
    if visit.request.method == "POST":
        if carried := carry_out(form, lambda data: _create(visit, data)):
            return _invited(visit, *carried.value)
        return refused(visit, "frontend/form.html", "Create tenant", form, **given)
    return show(visit, "frontend/form.html", "Create tenant", form=form, **given)


def _create(visit: PageContext, data: dict[str, Any]) -> tuple[Tenant, Invitation]:
    """Create the tenant, then the invitation. If the second step fails, the owner can still be invited."""
    made = actions.do_create_tenant(data["slug"], data["name"])
    return made, actions.do_invite(made, data["email"], Membership.Role.OWNER, by=visit.user)


def _invited(visit: PageContext, found: Tenant, made: Invitation) -> HttpResponse:
    """Return the link, this once: it works before the mail comes, and where none is sent."""
    settings = platform_settings()
    given: dict[str, Any] = {
        "tenant": found,
        "invitation": made,
        "link": invitations.link(made),
        "files": "" if settings.email_url else settings.data_dir.absolute() / "mail",
        "url": visit.url("operator-tenants-detail", found.pk),
    }
    return show(visit, "operator/tenants/invitation.html", "Invitation link", breadcrumbs=(_tenants(visit),), **given)


@operator_page(methods=FORM, step_up=True)
def suspend(visit: PageContext) -> HttpResponse:
    found = _found(visit)
    return _ask(
        visit,
        found,
        f"Suspend {found.name}",
        Confirm(found.slug, posted(visit)),
        lambda _: actions.do_suspend_tenant(found),
        submit="Suspend",
        said=lambda was: f"{found.name} was suspended." if was else f"{found.name} was already suspended.",
        effect=f"Within a second all keys of {found.name} receive 403, running requests end and batches pause."
        " Members can still sign in. Usage so far is billed.",
        danger=True,
    )


@operator_page(methods=FORM, step_up=True)
def resume(visit: PageContext) -> HttpResponse:
    found = _found(visit)
    return _ask(
        visit,
        found,
        f"Resume {found.name}",
        Confirm(found.slug, posted(visit)),
        lambda _: actions.do_resume_tenant(found),
        submit="Resume",
        said=lambda was: f"{found.name} was resumed." if was else f"{found.name} was not suspended.",
        effect=f"Within a second the keys of {found.name} work again and their usage is billed.",
    )


@operator_page(methods=FORM, step_up=True)
def raise_budget(visit: PageContext) -> HttpResponse:
    found = _found(visit)
    with visit.scope():
        budget = Budget.objects.for_tenant(found).filter(pk=visit.arguments["budget"], active=True).first()
    if budget is None:
        raise Http404
    return _ask(
        visit,
        found,
        f"Raise “{budget.name}”",
        forms.Raise(budget.unit, posted(visit)),
        lambda data: do_change_budget(budget, raise_amount=data["raise_amount"], raise_until=data["raise_until"]),
        submit="Raise",
        said=lambda changed: f"“{budget.name}” raised. {effect_of(changed)}",
        effect="Takes effect within a second and replaces a current temporary raise.",
    )


@operator_page(methods=FORM, step_up=True)
def book(visit: PageContext) -> HttpResponse:
    found = _found(visit)
    with visit.scope():
        books = list(PriceBook.objects.order_by("name").values_list("name", flat=True)) or [PriceBook.LIST]
        assigned = BookAssignment.objects.for_tenant(found).select_related("book").first()
    return _ask(
        visit,
        found,
        f"Price book of {found.name}",
        forms.Book(books, posted(visit), assigned.book.name if assigned else PriceBook.LIST),
        lambda data: do_assign_book(found, data["book"]),
        submit="Assign",
        said=lambda _: f"{found.name} now uses this price book.",
        effect="Applies to requests received from now. Earlier requests keep their prices.",
    )


@operator_page(methods=FORM, step_up=True)
def invite(visit: PageContext) -> HttpResponse:
    found = _found(visit)
    form = forms.TenantAdminInvite(posted(visit))
    back = visit.url("operator-tenants-detail", found.pk)
    given: dict[str, Any] = {"action": visit.request.path, "submit": "Invite", "back": back}
    given["breadcrumbs"] = (_tenants(visit), Breadcrumb(found.name, back))
    title = f"Invite owner of {found.name}"
    if visit.request.method == "POST":
        owner = Membership.Role.OWNER
        if carried := carry_out(form, lambda data: actions.do_invite(found, data["email"], owner, by=visit.user)):
            return _invited(visit, found, carried.value)
        return refused(visit, "frontend/form.html", title, form, **given)
    return show(visit, "frontend/form.html", title, form=form, **given)


@operator_page(methods=FORM)
def view(visit: PageContext) -> HttpResponse:
    """Begin to view; `next`: the page of the tenant's that was asked for."""
    found = _found(visit)
    wanted = visit.query.get("next", "")
    home = f"/t/{found.slug}/"
    inside = wanted.startswith(home) and url_has_allowed_host_and_scheme(wanted, allowed_hosts=None)
    form = forms.Why(posted(visit))
    given: dict[str, Any] = {
        "action": visit.request.get_full_path(),
        "submit": "View",
        "back": visit.url("operator-tenants-detail", found.pk),
        "breadcrumbs": (_tenants(visit), Breadcrumb(found.name, visit.url("operator-tenants-detail", found.pk))),
        "effect": "The view is recorded in the tenant’s audit log, with its time and your reason.",
    }
    title = f"View as {found.name}: read-only for up to 1 hour"
    if visit.request.method == "POST":
        if carry_out(form, lambda data: impersonation.start(visit.request, found, data["why"])):
            return done(visit, wanted if inside else home, f"You are viewing {found.name}, read-only.")
        return refused(visit, "frontend/form.html", title, form, **given)
    return show(visit, "frontend/form.html", title, form=form, **given)


@operator_page(methods=("POST",))
def end_view(visit: PageContext) -> HttpResponse:
    found = impersonation.end(visit.request)
    if found is None:
        return done(visit, visit.url("operator-tenants"), "The view has already ended.")
    return done(visit, visit.url("operator-tenants-detail", found.tenant_id), f"View of {found.name} ended.")


def _found(visit: PageContext) -> Tenant:
    with visit.scope():
        return detail.tenant_of(visit)


def _ask(
    visit: PageContext,
    found: Tenant,
    title: str,
    form: Any,
    verb: Callable[[dict[str, Any]], T],
    *,
    submit: str,
    said: Callable[[T], str],
    **given: Any,
) -> HttpResponse:
    """Return a form about the tenant, which leads back to its page."""
    back = visit.url("operator-tenants-detail", found.pk)
    breadcrumbs = (_tenants(visit), Breadcrumb(found.name, back))
    return ask(visit, title, form, verb, submit=submit, back=back, said=said, breadcrumbs=breadcrumbs, **given)


def _tenants(visit: PageContext) -> Breadcrumb:
    return Breadcrumb("Tenants", visit.url("operator-tenants"))


urlpatterns = [
    path("operator/tenants/", tenants, name="operator-tenants"),
    path("operator/tenants/new", new, name="operator-tenants-new"),
    path("operator/tenants/view/end", end_view, name="operator-tenants-view-end"),
    LIST.operator_url("operator/tenants/"),
    path("operator/tenants/<int:tenant>/", tenant, name="operator-tenants-detail"),
    path("operator/tenants/<int:tenant>/suspend", suspend, name="operator-tenants-suspend"),
    path("operator/tenants/<int:tenant>/resume", resume, name="operator-tenants-resume"),
    path("operator/tenants/<int:tenant>/book", book, name="operator-tenants-book"),
    path("operator/tenants/<int:tenant>/invite", invite, name="operator-tenants-invite"),
    path("operator/tenants/<int:tenant>/view", view, name="operator-tenants-view"),
    path("operator/tenants/<int:tenant>/budgets/<int:budget>/raise", raise_budget, name="operator-tenants-raise"),
    ONE.operator_url("operator/tenants/<int:tenant>/"),
]
