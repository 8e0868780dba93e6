"""Notifications of operators: the list, the link to an object, and the operator's channels."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from frontend.core import notification_center as center
from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.screens import ConsoleScreen

PANELS = Panels(
    "operator-notifications-panel",
    (Panel("list", _lazy("Notifications"), "notifications/page.html#list", center.find_notifications, every=60),),
)


@operator_page()
def notifications(ctx: PageContext) -> HttpResponse:
    return center.show_list(ctx, PANELS)


@operator_page()
def open_notification(ctx: PageContext) -> HttpResponse:
    return center.open_notification(ctx, ctx.arguments["operator_notification"])


@operator_page(methods=("POST",))
def mark_as_read(ctx: PageContext) -> HttpResponse:
    return center.mark_as_read(ctx)


@operator_page(methods=FORM)
def channels(ctx: PageContext) -> HttpResponse:
    return center.edit_channels(ctx)


SCREEN = ConsoleScreen("operator-notifications", _lazy("Notifications"), icon="alerts")
_ROOT = "operator/notifications/"
urlpatterns = [
    path(_ROOT, notifications, name="operator-notifications"),
    path(f"{_ROOT}read", mark_as_read, name="operator-notifications-read"),
    path(f"{_ROOT}channels", channels, name="operator-notifications-channels"),
    path(f"{_ROOT}<int:operator_notification>", open_notification, name="operator-notifications-open"),
    PANELS.operator_url(_ROOT),
]
