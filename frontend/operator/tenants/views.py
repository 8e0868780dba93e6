"""Tenants: the list, one tenant, the actions on it, and impersonation."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.forms import Form
from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.budgets.budgets import do_change_budget
from billing.models import Budget, PriceBook, PriceBookAssignment
from billing.pricing.prices import do_assign_book
from frontend.core import impersonation
from frontend.core.form_view import bound_data
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.one_time_secrets import secret_form_view, take_secret
from frontend.core.page_context import FORM, PageContext, first_or_404, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.tenants import detail, forms, one_off_lines, page, recurring_charges
from frontend.operator.tenants.tenant_form import tenant_form_view, tenants_breadcrumb
from frontend.tenant.budgets.effect import effect_of
from tenants import actions, invitations
from tenants.models import Invitation, Membership, Tenant
from tenants.site_urls import is_site_url

LIST = Panels(
    "operator-tenants-panel",
    (
        Panel("stats", _lazy("All tenants"), "operator/tenants/page.html#stats", page.stats, every=60),
        Panel("list", _lazy("Tenants"), "operator/tenants/page.html#list", page.tenant_list, every=60),
    ),
)
DETAIL_PANELS = Panels(
    "operator-tenants-detail-panel",
    (
        Panel("stats", _lazy("Figures"), "operator/tenants/detail.html#detail_stats", detail.stats),
        Panel("spend", _lazy("Spend by day"), "operator/tenants/detail.html#spend", detail.spend, every=0),
        Panel("plan", _lazy("Plan"), "operator/tenants/detail.html#plan", detail.plan, every=0),
        Panel("limits", _lazy("Budgets and limits"), "operator/tenants/detail.html#limits", detail.limits),
        Panel(
            "commitments",
            _lazy("Commitments"),
            "operator/tenants/charges.html#commitments",
            recurring_charges.commitments,
            every=0,
        ),
        Panel(
            "terms",
            _lazy("Price terms"),
            "operator/tenants/charges.html#terms",
            recurring_charges.price_terms,
            every=0,
        ),
        Panel(
            "lines",
            _lazy("One-off lines"),
            "operator/tenants/charges.html#lines",
            one_off_lines.one_off_lines,
            every=0,
        ),
        Panel("members", _lazy("Members"), "operator/tenants/detail.html#members", detail.members, every=0),
        Panel("credits", _lazy("Credits"), "operator/tenants/detail.html#credits", detail.credits, every=0),
        Panel("invoices", _lazy("Invoices"), "operator/tenants/detail.html#invoices", detail.invoices, every=0),
        Panel("quarantine", _lazy("Quarantine"), "operator/tenants/detail.html#quarantine", detail.quarantine),
        Panel("changes", _lazy("Latest changes"), "operator/tenants/detail.html#changes", detail.changes),
    ),
)


@operator_page()
def tenants(ctx: PageContext) -> HttpResponse:
    context: dict[str, Any] = {"filters": page.filters(ctx), "metering": metering(ctx.now), **page.TOOLS.page(ctx)}
    return render_page(ctx, "operator/tenants/page.html", _("Tenants"), panels=LIST, **context)


@operator_page()
def tenant(ctx: PageContext) -> HttpResponse:
    found = _tenant(ctx)
    context: dict[str, Any] = {
        "breadcrumbs": (tenants_breadcrumb(ctx),),
        "tenant": found,
        "metering": metering(ctx.now),
    }
    return render_page(ctx, "operator/tenants/detail.html", found.name, panels=DETAIL_PANELS, **context)


@operator_page(methods=FORM, step_up=True)
def create_tenant(ctx: PageContext) -> HttpResponse:
    def create(data: dict[str, Any]) -> tuple[str, str]:
        made = actions.do_create_tenant(data["slug"], data["name"])
        return _invite_owner(ctx, made, data["email"])

    return secret_form_view(
        ctx,
        _("Create tenant"),
        forms.NewTenantForm(bound_data(ctx)),
        create,
        submit=_("Create tenant"),
        back=ctx.url("operator-tenants"),
        breadcrumbs=(tenants_breadcrumb(ctx),),
    )


def _invite_owner(ctx: PageContext, found: Tenant, email: str) -> tuple[str, str]:
    """Invite an owner, and return the URL of the page that shows the invitation link once, and the link."""
    made = actions.do_invite(found, email, Membership.Role.OWNER, by=ctx.user)
    return ctx.url("operator-tenants-invitation", found.pk, made.pk), invitations.link(made)


@operator_page(step_up=True)
def invitation(ctx: PageContext) -> HttpResponse:
    """Show the link of an invitation that the user has just created. Later requests are redirected to the tenant.

    The link works also if no email is sent.
    """
    found = _tenant(ctx)
    made = ctx.get(lambda: Invitation.objects.for_tenant(found).filter(pk=ctx.arguments["invitation"]))
    url = ctx.url("operator-tenants-detail", found.pk)
    link = take_secret(ctx) if ctx.request.method == "GET" else None
    if link is None:
        message = _("The invitation link of %(email)s was shown once. Invite the owner again to get a new one.") % {
            "email": made.email
        }
        return redirect_with_message(ctx, url, message)
    platform = settings.MILLRACE
    context: dict[str, Any] = {
        "tenant": found,
        "invitation": made,
        "link": link,
        "files": "" if platform.email_url else platform.data_dir.absolute() / "mail",
        "url": url,
        "breadcrumbs": (tenants_breadcrumb(ctx),),
    }
    return render_page(ctx, "operator/tenants/page.html#invitation", _("Invitation link"), **context)


@operator_page(methods=FORM, step_up=True)
def suspend(ctx: PageContext) -> HttpResponse:
    found = _tenant(ctx)
    return tenant_form_view(
        ctx,
        found,
        _("Suspend %(name)s") % {"name": found.name},
        Form(bound_data(ctx)),
        lambda _: actions.do_suspend_tenant(found),
        submit=_("Suspend"),
        message=lambda was: (
            _("%(name)s was suspended.") % {"name": found.name}
            if was
            else _("%(name)s was already suspended.") % {"name": found.name}
        ),
        effect=_(
            "Within a second all keys of %(name)s receive 403, running requests end and batches pause. Members "
            "can still sign in. Usage so far is billed."
        )
        % {"name": found.name},
        danger=True,
    )


@operator_page(methods=FORM, step_up=True)
def resume(ctx: PageContext) -> HttpResponse:
    found = _tenant(ctx)
    return tenant_form_view(
        ctx,
        found,
        _("Resume %(name)s") % {"name": found.name},
        Form(bound_data(ctx)),
        lambda _: actions.do_resume_tenant(found),
        submit=_("Resume"),
        message=lambda was: (
            _("%(name)s was resumed.") % {"name": found.name}
            if was
            else _("%(name)s was not suspended.") % {"name": found.name}
        ),
        effect=_("Within a second the keys of %(name)s work again and their usage is billed.") % {"name": found.name},
    )


@operator_page(methods=FORM, step_up=True)
def raise_budget(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        found = detail.tenant_of(ctx)
        budget = first_or_404(Budget.objects.for_tenant(found).filter(pk=ctx.arguments["budget"], active=True))
        form = forms.BudgetRaiseForm(budget.unit, bound_data(ctx))
    return tenant_form_view(
        ctx,
        found,
        _("Raise “%(name)s”") % {"name": budget.name},
        form,
        lambda data: do_change_budget(
            budget, temporary_increase=data["temporary_increase"], increase_expires_at=data["increase_expires_at"]
        ),
        submit=_("Raise"),
        message=lambda changed: f"“{budget.name}” raised. {effect_of(changed)}",
        effect=_("Takes effect within a second and replaces a current temporary raise."),
    )


@operator_page(methods=FORM, step_up=True)
def book(ctx: PageContext) -> HttpResponse:
    found = _tenant(ctx)
    with ctx.scope():
        books = list(PriceBook.objects.order_by("name").values_list("name", flat=True)) or [PriceBook.LIST]
        assigned = PriceBookAssignment.objects.for_tenant(found).select_related("book").first()
    return tenant_form_view(
        ctx,
        found,
        _("Price book of %(name)s") % {"name": found.name},
        forms.PriceBookForm(books, bound_data(ctx), assigned.book.name if assigned else PriceBook.LIST),
        lambda data: do_assign_book(found, data["book"]),
        submit=_("Assign"),
        message=lambda _done: _("%(name)s now uses this price book.") % {"name": found.name},
        effect=_("Applies to requests received from now. Earlier requests keep their prices."),
    )


@operator_page(methods=FORM, step_up=True)
def invite(ctx: PageContext) -> HttpResponse:
    found = _tenant(ctx)
    back = ctx.url("operator-tenants-detail", found.pk)
    return secret_form_view(
        ctx,
        _("Invite owner of %(name)s") % {"name": found.name},
        forms.TenantAdminInvite(bound_data(ctx)),
        lambda data: _invite_owner(ctx, found, data["email"]),
        submit=_("Invite"),
        back=back,
        breadcrumbs=(tenants_breadcrumb(ctx), Breadcrumb(found.name, back)),
    )


@operator_page(methods=FORM)
def view(ctx: PageContext) -> HttpResponse:
    """Start an impersonation. `next` is the tenant's page that was requested."""
    found = _tenant(ctx)
    url = ctx.query.get("next", "")
    home = f"/t/{found.slug}/"
    inside = url.startswith(home) and is_site_url(url)
    return tenant_form_view(
        ctx,
        found,
        _("View as %(name)s: read-only for up to 1 hour") % {"name": found.name},
        forms.ImpersonationForm(bound_data(ctx)),
        lambda data: impersonation.start(ctx.request, found, data["reason"]),
        submit=_("View"),
        message=lambda _done: _("You are viewing %(name)s, read-only.") % {"name": found.name},
        then=url if inside else home,
        action_url=ctx.request.get_full_path(),
        effect=_("The view is recorded in the tenant’s audit log, with its time and your reason."),
    )


@operator_page(methods=("POST",))
def end_view(ctx: PageContext) -> HttpResponse:
    found = impersonation.end(ctx.request)
    if found is None:
        return redirect_with_message(ctx, ctx.url("operator-tenants"), _("The view has already ended."))
    return redirect_with_message(
        ctx, ctx.url("operator-tenants-detail", found.tenant_id), _("View of %(name)s ended.") % {"name": found.name}
    )


def _tenant(ctx: PageContext) -> Tenant:
    with ctx.scope():
        return detail.tenant_of(ctx)


SCREEN = ConsoleScreen(
    "operator-tenants",
    _lazy("Tenants"),
    icon="tenants",
    letter="t",
    group="top",
    order=20,
    finders={_lazy("Tenants"): page.find_tenants},
)
urlpatterns = [
    path("operator/tenants/", tenants, name="operator-tenants"),
    *page.TOOLS.operator_urls("operator/tenants/"),
    path("operator/tenants/new", create_tenant, name="operator-tenants-new"),
    path("operator/tenants/view/end", end_view, name="operator-tenants-view-end"),
    LIST.operator_url("operator/tenants/"),
    path("operator/tenants/<int:tenant>/", tenant, name="operator-tenants-detail"),
    path("operator/tenants/<int:tenant>/suspend", suspend, name="operator-tenants-suspend"),
    path("operator/tenants/<int:tenant>/resume", resume, name="operator-tenants-resume"),
    path("operator/tenants/<int:tenant>/book", book, name="operator-tenants-book"),
    path("operator/tenants/<int:tenant>/invite", invite, name="operator-tenants-invite"),
    path("operator/tenants/<int:tenant>/invitations/<int:invitation>", invitation, name="operator-tenants-invitation"),
    path("operator/tenants/<int:tenant>/view", view, name="operator-tenants-view"),
    path("operator/tenants/<int:tenant>/budgets/<int:budget>/raise", raise_budget, name="operator-tenants-raise"),
    path(
        "operator/tenants/<int:tenant>/commitments/new",
        recurring_charges.add_commitment,
        name="operator-tenants-add-commitment",
    ),
    path(
        "operator/tenants/<int:tenant>/commitments/<int:commitment>/end",
        recurring_charges.end_commitment,
        name="operator-tenants-end-commitment",
    ),
    *(
        path(f"operator/tenants/<int:tenant>/price-terms/{name}", view, name=f"operator-tenants-add-{name}")
        for name, view in (
            ("minimum", recurring_charges.add_minimum),
            ("discount", recurring_charges.add_discount),
            ("tiered-price", recurring_charges.add_tiered_price),
        )
    ),
    path(
        "operator/tenants/<int:tenant>/price-terms/<int:price_term>/end",
        recurring_charges.end_price_term,
        name="operator-tenants-end-price-term",
    ),
    path("operator/tenants/<int:tenant>/one-off-lines/new", one_off_lines.add, name="operator-tenants-add-line"),
    path(
        "operator/tenants/<int:tenant>/one-off-lines/<int:one_off_line>/end",
        one_off_lines.end,
        name="operator-tenants-end-line",
    ),
    path(
        "operator/tenants/<int:tenant>/one-off-lines/<int:one_off_line>/remove",
        one_off_lines.remove,
        name="operator-tenants-remove-line",
    ),
    DETAIL_PANELS.operator_url("operator/tenants/<int:tenant>/"),
]
