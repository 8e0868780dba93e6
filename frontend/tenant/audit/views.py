"""The tenant's audit log: the list, and the drawer of one entry."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core import audit_log
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from tenants.permissions import Permission

PANELS = Panels(
    "audit-panel", (Panel("entries", _lazy("Changes"), "audit_log/entries.html", audit_log.entries, every=0),)
)


@tenant_page(Permission.AUDIT_READ)
def audit(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context = audit_log.page_context(ctx)
    return render_page(ctx, "audit/page.html", _("Audit log"), panels=PANELS, **context)


@tenant_page(Permission.AUDIT_READ)
def entry(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        detail = audit_log.detail(ctx, ctx.arguments["entry"])
    breadcrumbs = (Breadcrumb(_("Audit log"), ctx.url("audit")),)
    return render_page(ctx, "audit_log/detail.html", detail["entry"].label, breadcrumbs=breadcrumbs, **detail)


SCREEN = ConsoleScreen(
    "audit", _lazy("Audit log"), icon="audit", letter="a", group="organization", order=30, needs=Permission.AUDIT_READ
)
urlpatterns = [
    path("t/<slug:slug>/audit/", audit, name="audit"),
    *audit_log.TOOLS.tenant_urls("t/<slug:slug>/audit/", Permission.AUDIT_READ),
    path("t/<slug:slug>/audit/<int:entry>", entry, name="audit-detail"),
    PANELS.tenant_url("t/<slug:slug>/audit/", Permission.AUDIT_READ),
]
