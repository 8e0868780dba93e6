"""Members: the page, and the actions invite, change role, remove and leave."""

from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.urls import path, reverse
from django.utils.translation import gettext as _

from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.labels import choice_label
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen, PaletteAction
from frontend.tenant.members import page
from tenants import actions
from tenants.models import Invitation, Membership
from tenants.permissions import Permission

PANELS = Panels(
    "members-panel",
    (
        Panel("members", _lazy("Members"), "members/page.html#members", page.members, every=0),
        Panel("invitations", _lazy("Invitations"), "members/page.html#invitations", page.invitations),
    ),
)
MESSAGES = {
    "owner": _lazy("Owner: full access, including owners and deleting the organization"),
    "admin": _lazy("Admin: full access except owners, billing details and deletion"),
    "developer": _lazy("Developer: keys, routing and usage"),
    "billing": _lazy("Billing: invoices, billing details and usage"),
    "readonly": _lazy("Read only: view keys, routing, limits and usage"),
}


class RoleForm(forms.Form):
    """A role. Only owners can select the role owner."""

    role = forms.ChoiceField(label=_lazy("Role"))

    def __init__(self, ctx: PageContext, data: Any = None, role: str = "developer") -> None:
        super().__init__(data, initial={"role": role})
        field = self.fields["role"]
        if not isinstance(field, forms.ChoiceField):
            raise TypeError("the role is a choice")
        field.choices = [(role, MESSAGES[role]) for role in Membership.Role.values if page.may_change(ctx, role)]


class MemberInvite(RoleForm):
    """The email address and the role of an invitation."""

    email = forms.EmailField(
        label=_lazy("Email address"),
        max_length=254,
        help_text=_lazy("Receives an invitation link. It works once, for 7 days, and only for this address."),
        widget=forms.EmailInput(attrs={"autocomplete": "off"}),
    )
    field_order = ("email", "role")


@tenant_page(Permission.MEMBERS_READ)
def members(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context = {"roles": page.roles(), "filters": page.filters(ctx), **page.TOOLS.page(ctx)}
    return render_page(ctx, "members/page.html", _("Members"), panels=PANELS, **context)


@tenant_page(Permission.MEMBERS_WRITE, methods=FORM)
def invite(ctx: PageContext) -> HttpResponse:
    return form_view(
        ctx,
        _("Invite member"),
        MemberInvite(ctx, bound_data(ctx)),
        lambda data: actions.do_invite(ctx.tenant, data["email"], data["role"], by=ctx.user),
        message=lambda made: _("%(email)s was invited.%(unsent)s") % {"email": made.email, "unsent": _unsent()},
        **_sheet(ctx, _("Send invitation")),
    )


@tenant_page(Permission.MEMBERS_WRITE, methods=FORM)
def resend(ctx: PageContext) -> HttpResponse:
    row = _invitation(ctx)
    return form_view(
        ctx,
        _("Resend invitation to %(email)s") % {"email": row.email},
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_invite(ctx.tenant, row.email, row.role, by=ctx.user),
        message=lambda made: _("%(email)s was invited again.%(unsent)s") % {"email": made.email, "unsent": _unsent()},
        effect=_("Sends a new invitation email. The previous link stops working."),
        **_sheet(ctx, _("Resend")),
    )


@tenant_page(Permission.MEMBERS_WRITE, methods=FORM)
def revoke_invitation(ctx: PageContext) -> HttpResponse:
    row = _invitation(ctx)
    return form_view(
        ctx,
        _("Revoke invitation of %(email)s") % {"email": row.email},
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_revoke_invitation(row),
        message=lambda was: (
            _("Invitation of %(email)s revoked.") % {"email": row.email}
            if was
            else _("The invitation was already used or revoked.")
        ),
        effect=_("The invitation link stops working immediately."),
        **_sheet(ctx, _("Revoke")),
    )


@tenant_page(Permission.MEMBERS_WRITE, methods=FORM)
def role(ctx: PageContext) -> HttpResponse:
    row = _member(ctx)
    return form_view(
        ctx,
        _("Role of %(email)s") % {"email": row.user.email},
        RoleForm(ctx, bound_data(ctx), row.role),
        lambda data: actions.do_change_role(row, data["role"]),
        message=lambda changed: (
            _("Role of %(email)s changed to %(role)s.")
            % {"email": row.user.email, "role": choice_label(changed.get_role_display())}
        ),
        **_sheet(ctx, _("Change role")),
    )


@tenant_page(Permission.MEMBERS_WRITE, methods=FORM)
def remove(ctx: PageContext) -> HttpResponse:
    row = _member(ctx)
    return form_view(
        ctx,
        _("Remove %(email)s") % {"email": row.user.email},
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_remove_member(row),
        message=lambda _done: _("%(email)s was removed.") % {"email": row.user.email},
        effect=_(
            "%(email)s loses access to %(name)s immediately. Keys the member created keep working, because keys "
            "belong to projects. Revoke the keys the member has seen."
        )
        % {"email": row.user.email, "name": ctx.tenant.name},
        danger=True,
        **_sheet(ctx, _("Remove")),
    )


@tenant_page(methods=FORM, step_up=True)
def leave(ctx: PageContext) -> HttpResponse:
    row = ctx.get(lambda: page.memberships(ctx).filter(user=ctx.user))
    return form_view(
        ctx,
        _("Leave %(name)s") % {"name": ctx.tenant.name},
        Confirm(ctx.tenant.slug, bound_data(ctx)),
        lambda _: actions.do_remove_member(row),
        message=lambda _done: _("You left %(name)s.") % {"name": ctx.tenant.name},
        then=reverse("home"),
        effect=_("You lose access to %(name)s immediately, until you are invited again.") % {"name": ctx.tenant.name},
        danger=True,
        **_sheet(ctx, _("Leave")),
    )


def _unsent() -> str:
    """Return the directory of emails if no mail server is configured. Inviters never see the link itself."""
    if settings.MILLRACE.email_url:
        return ""
    return _(" No mail server is configured. The operator can find the email in the platform’s data directory.")


def _sheet(ctx: PageContext, submit: str) -> dict[str, Any]:
    back = ctx.url("members")
    return {"submit": submit, "back": back, "breadcrumbs": (Breadcrumb(_("Members"), back),)}


def _member(ctx: PageContext) -> Membership:
    row = ctx.get(lambda: page.memberships(ctx).filter(pk=ctx.arguments["member"]))
    if not page.may_change(ctx, row.role):
        raise PermissionDenied
    return row


def _invitation(ctx: PageContext) -> Invitation:
    row = ctx.get(lambda: page.find_invitations(ctx).filter(pk=ctx.arguments["invitation"]))
    if not page.may_change(ctx, row.role):
        raise PermissionDenied
    return row


SCREEN = ConsoleScreen(
    "members",
    _lazy("Members"),
    icon="members",
    letter="m",
    group="organization",
    order=10,
    needs=Permission.MEMBERS_READ,
    actions=(
        PaletteAction(_lazy("Invite member"), "members-invite", "members", Permission.MEMBERS_WRITE, in_dialog=True),
    ),
)
urlpatterns = [
    path("t/<slug:slug>/members/", members, name="members"),
    *page.TOOLS.tenant_urls("t/<slug:slug>/members/", Permission.MEMBERS_READ),
    path("t/<slug:slug>/members/invite", invite, name="members-invite"),
    path("t/<slug:slug>/members/leave", leave, name="members-leave"),
    path("t/<slug:slug>/members/<int:member>/role", role, name="members-role"),
    path("t/<slug:slug>/members/<int:member>/remove", remove, name="members-remove"),
    path("t/<slug:slug>/members/invitations/<int:invitation>/resend", resend, name="members-resend"),
    path(
        "t/<slug:slug>/members/invitations/<int:invitation>/revoke", revoke_invitation, name="members-invitation-revoke"
    ),
    PANELS.tenant_url("t/<slug:slug>/members/", Permission.MEMBERS_READ),
]
