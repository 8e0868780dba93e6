"""The operators' list of users, one user, and the actions on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from django.forms import Form
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.users import page
from tenants import actions
from tenants.models import User

LIST = Panels(
    "operator-users-panel", (Panel("list", _lazy("Users"), "operator/users/page.html#list", page.user_list, every=0),)
)
DETAIL_PANELS = Panels(
    "operator-users-detail-panel",
    (
        Panel("memberships", _lazy("Tenants"), "operator/users/detail.html#memberships", page.memberships, every=0),
        Panel("changes", _lazy("Latest changes"), "operator/users/detail.html#changes", page.changes, every=0),
    ),
)


@dataclass(frozen=True)
class Action:
    """An action on a user, and its form. `{}` in the texts is replaced by the email address."""

    run: Callable[[User], bool]
    title: str
    submit: str
    effect: str
    done: str
    not_needed: str
    is_dangerous: bool = True
    is_final: bool = False  # it cannot be undone


ACTIONS = {
    "deactivate": Action(
        actions.do_deactivate_user,
        _lazy("Deactivate {}"),
        _lazy("Deactivate"),
        _lazy(
            "{} is signed out on all devices and cannot sign in until reactivated. Playground sessions end. API "
            "keys and memberships stay."
        ),
        _lazy("{} was deactivated."),
        _lazy("{} was already deactivated."),
    ),
    "reactivate": Action(
        actions.do_reactivate_user,
        _lazy("Reactivate {}"),
        _lazy("Reactivate"),
        _lazy("{} can sign in again, with the same password, two-factor authentication and memberships."),
        _lazy("{} was reactivated."),
        _lazy("{} was already active."),
        is_dangerous=False,
    ),
    "grant-operator": Action(
        actions.do_grant_operator,
        _lazy("Grant operator rights to {}"),
        _lazy("Grant"),
        _lazy("{} gets every permission in every tenant, and this operator console."),
        _lazy("Operator rights were granted to {}."),
        _lazy("{} was already an operator."),
    ),
    "revoke-operator": Action(
        actions.do_revoke_operator,
        _lazy("Revoke operator rights of {}"),
        _lazy("Revoke"),
        _lazy("{} loses the operator console and is signed out on all devices. Memberships stay."),
        _lazy("Operator rights of {} were revoked."),
        _lazy("{} was not an operator."),
    ),
    "remove-second-factor": Action(
        actions.do_remove_second_factor,
        _lazy("Remove two-factor authentication of {}"),
        _lazy("Remove"),
        _lazy(
            "{} can sign in with only the password, is signed out on all devices, and gets an email about this. "
            "Verify the user's identity first."
        ),
        _lazy("Two-factor authentication of {} was removed."),
        _lazy("{} had no two-factor authentication."),
        is_final=True,
    ),
}


@operator_page()
def users(ctx: PageContext) -> HttpResponse:
    return render_page(
        ctx, "operator/users/page.html", _("Users"), panels=LIST, filters=page.filters(ctx), **page.TOOLS.page(ctx)
    )


@operator_page()
def user(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        found = page.user_page(ctx)
    return render_page(
        ctx,
        "operator/users/detail.html",
        found["user"].email,
        panels=DETAIL_PANELS,
        breadcrumbs=(_users(ctx),),
        page=found,
    )


def _form(action: Action) -> Callable[..., HttpResponseBase]:
    @operator_page(methods=FORM, step_up=True)
    def view(ctx: PageContext) -> HttpResponse:
        with ctx.scope():
            found = page.user_of(ctx)
        email, back = found.email, ctx.url("operator-users-detail", found.pk)
        return form_view(
            ctx,
            action.title.format(email),
            Confirm(email, bound_data(ctx)) if action.is_final else Form(bound_data(ctx)),
            lambda _: action.run(found),
            submit=action.submit,
            back=back,
            message=lambda was: (action.done if was else action.not_needed).format(email),
            breadcrumbs=(_users(ctx), Breadcrumb(email, back)),
            effect=action.effect.format(email),
            danger=action.is_dangerous,
        )

    return view


def _users(ctx: PageContext) -> Breadcrumb:
    return Breadcrumb(_("Users"), ctx.url("operator-users"))


SCREEN = ConsoleScreen(
    "operator-users",
    _lazy("Users"),
    icon="members",
    letter="u",
    group="top",
    order=30,
    finders={_lazy("Users"): page.find_users},
)
urlpatterns = [
    path("operator/users/", users, name="operator-users"),
    *page.TOOLS.operator_urls("operator/users/"),
    LIST.operator_url("operator/users/"),
    path("operator/users/<int:user>/", user, name="operator-users-detail"),
    DETAIL_PANELS.operator_url("operator/users/<int:user>/"),
    *(
        path(f"operator/users/<int:user>/{name}", _form(action), name=f"operator-users-{name}")
        for name, action in ACTIONS.items()
    ),
]
