"""Members: the page, and inviting, changing a role, removing, leaving."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.urls import path, reverse

from frontend.core.confirmation import Confirm
from frontend.core.form_view import ask, posted
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import show
from frontend.tenant.members import page
from millrace.conf.environment import platform_settings
from tenants import actions
from tenants.models import Invitation, Membership
from tenants.permissions import Permission

PANELS = Panels(
    "members-panel",
    (
        Panel("members", "Members", "members/members.html", page.members, every=0),
        Panel("invitations", "Invitations", "members/invitations.html", page.invited),
    ),
)
SAYS = {
    "owner": "Owner: full access, including owners and deleting the organization",
    "admin": "Admin: full access except owners, billing details and deletion",
    "developer": "Developer: keys, routing and usage",
    "billing": "Billing: invoices, billing details and usage",
    "readonly": "Read only: view keys, routing, limits and usage",
}


class RoleForm(forms.Form):
    """Which role; owners are offered to owners alone."""

    role = forms.ChoiceField(label="Role")

    def __init__(self, visit: PageContext, data: Any = None, role: str = "developer") -> None:
        super().__init__(data, initial={"role": role})
        field = self.fields["role"]
        if not isinstance(field, forms.ChoiceField):
            raise TypeError("the role is a choice")
        field.choices = [(role, SAYS[role]) for role in Membership.Role.values if page.may_touch(visit, role)]


class MemberInvite(RoleForm):
    """Whom, and as what."""

    email = forms.EmailField(
        label="Email address",
        max_length=254,
        help_text="Receives an invitation link. It works once, for 7 days, and only for this address.",
        widget=forms.EmailInput(attrs={"autocomplete": "off"}),
    )
    field_order = ("email", "role")


@tenant_page(Permission.MEMBERS_READ)
def members(visit: PageContext) -> HttpResponse:
    given: dict[str, Any] = {"roles": page.roles(), "typed": visit.query.get("q", "")[:100]}
    invite_url = visit.url("members-invite") if visit.may(Permission.MEMBERS_WRITE) else ""
    return show(visit, "members/page.html", "Members", panels=PANELS, invite_url=invite_url, **given)


@tenant_page(Permission.MEMBERS_WRITE, methods=FORM)
def invite(visit: PageContext) -> HttpResponse:
    return ask(
        visit,
        "Invite member",
        MemberInvite(visit, posted(visit)),
        lambda data: actions.do_invite(visit.tenant, data["email"], data["role"], by=visit.user),
        said=lambda made: f"{made.email} was invited.{_unsent()}",
        **_sheet(visit, "Send invitation"),
    )


@tenant_page(Permission.MEMBERS_WRITE, methods=FORM)
def resend(visit: PageContext) -> HttpResponse:
    row = _invitation(visit)
    return ask(
        visit,
        f"Resend invitation to {row.email}",
        forms.Form(posted(visit)),
        lambda _: actions.do_invite(visit.tenant, row.email, row.role, by=visit.user),
        said=lambda made: f"{made.email} was invited again.{_unsent()}",
        effect="Sends a new invitation email. The previous link stops working.",
        **_sheet(visit, "Resend"),
    )


@tenant_page(Permission.MEMBERS_WRITE, methods=FORM)
def withdraw(visit: PageContext) -> HttpResponse:
    row = _invitation(visit)
    return ask(
        visit,
        f"Revoke invitation of {row.email}",
        forms.Form(posted(visit)),
        lambda _: actions.do_revoke_invitation(row),
        said=lambda was: (
            f"Invitation of {row.email} revoked." if was else "The invitation was already used or revoked."
        ),
        effect="The invitation link stops working immediately.",
        **_sheet(visit, "Revoke"),
    )


@tenant_page(Permission.MEMBERS_WRITE, methods=FORM)
def role(visit: PageContext) -> HttpResponse:
    row = _member(visit)
    return ask(
        visit,
        f"Role of {row.user.email}",
        RoleForm(visit, posted(visit), row.role),
        lambda data: actions.do_change_role(row, data["role"]),
        said=lambda changed: f"Role of {row.user.email} changed to {changed.get_role_display()}.",
        **_sheet(visit, "Change role"),
    )


@tenant_page(Permission.MEMBERS_WRITE, methods=FORM)
def remove(visit: PageContext) -> HttpResponse:
    row = _member(visit)
    return ask(
        visit,
        f"Remove {row.user.email}",
        Confirm(row.user.email, posted(visit)),
        lambda _: actions.do_remove_member(row),
        said=lambda _: f"{row.user.email} was removed.",
        effect=f"{row.user.email} loses access to {visit.tenant.name} immediately. Keys the member created keep"
        " working, because keys belong to projects. Revoke the keys the member has seen.",
        danger=True,
        **_sheet(visit, "Remove"),
    )


@tenant_page(methods=FORM, step_up=True)
def leave(visit: PageContext) -> HttpResponse:
    with visit.scope():
        row = page.memberships(visit).filter(user=visit.user).first()
    if row is None:
        raise Http404
    return ask(
        visit,
        f"Leave {visit.tenant.name}",
        Confirm(visit.tenant.slug, posted(visit)),
        lambda _: actions.do_remove_member(row),
        said=lambda _: f"You left {visit.tenant.name}.",
        then=reverse("home"),
        effect=f"You lose access to {visit.tenant.name} immediately, until you are invited again.",
        danger=True,
        **_sheet(visit, "Leave"),
    )


def _unsent() -> str:
    """Where the mail is if none goes out. Inviters are not shown its link: who has it is taken to be the invited."""
    if platform_settings().email_url:
        return ""
    return " No mail server is configured. The operator can find the email in the platform’s data directory."


def _sheet(visit: PageContext, submit: str) -> dict[str, Any]:
    back = visit.url("members")
    return {"submit": submit, "back": back, "breadcrumbs": (Breadcrumb("Members", back),)}


def _member(visit: PageContext) -> Membership:
    with visit.scope():
        row = page.memberships(visit).filter(pk=visit.arguments["member"]).first()
    if row is None:
        raise Http404
    if not page.may_touch(visit, row.role):
        raise PermissionDenied
    return row


def _invitation(visit: PageContext) -> Invitation:
    with visit.scope():
        row = page.pending(visit).filter(pk=visit.arguments["invitation"]).first()
    if row is None:
        raise Http404
    if not page.may_touch(visit, row.role):
        raise PermissionDenied
    return row


urlpatterns = [
    path("t/<slug:slug>/members/", members, name="members"),
    path("t/<slug:slug>/members/invite", invite, name="members-invite"),
    path("t/<slug:slug>/members/leave", leave, name="members-leave"),
    path("t/<slug:slug>/members/<int:member>/role", role, name="members-role"),
    path("t/<slug:slug>/members/<int:member>/remove", remove, name="members-remove"),
    path("t/<slug:slug>/members/invitations/<int:invitation>/resend", resend, name="members-resend"),
    path("t/<slug:slug>/members/invitations/<int:invitation>/withdraw", withdraw, name="members-withdraw"),
    PANELS.tenant_url("t/<slug:slug>/members/", Permission.MEMBERS_READ),
]
