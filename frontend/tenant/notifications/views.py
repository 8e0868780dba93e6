"""Notifications of a tenant: the list, the link to an object, and the user's channels."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from frontend.core import notification_center as center
from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.screens import ConsoleScreen
from tenants.permissions import Permission

PANELS = Panels(
    "notifications-panel",
    (Panel("list", _lazy("Notifications"), "notifications/page.html#list", center.find_notifications, every=60),),
)


@tenant_page()
def notifications(ctx: PageContext) -> HttpResponse:
    return center.show_list(ctx, PANELS)


@tenant_page()
def open_notification(ctx: PageContext) -> HttpResponse:
    return center.open_notification(ctx, ctx.arguments["notification"])


@tenant_page(methods=("POST",))
def mark_as_read(ctx: PageContext) -> HttpResponse:
    return center.mark_as_read(ctx)


@tenant_page(methods=FORM)
def channels(ctx: PageContext) -> HttpResponse:
    return center.edit_channels(ctx)


SCREEN = ConsoleScreen("notifications", _lazy("Notifications"), icon="alerts", needs=Permission.TENANT_READ)
_ROOT = "t/<slug:slug>/notifications/"
urlpatterns = [
    path(_ROOT, notifications, name="notifications"),
    path(f"{_ROOT}read", mark_as_read, name="notifications-read"),
    path(f"{_ROOT}channels", channels, name="notifications-channels"),
    path(f"{_ROOT}<int:notification>", open_notification, name="notifications-open"),
    PANELS.tenant_url(_ROOT),
]
