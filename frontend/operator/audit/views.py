"""The audit log for operators: the list, and the drawer of one entry."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core import audit_log
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen

PANELS = Panels(
    "operator-audit-panel", (Panel("entries", _lazy("Changes"), "audit_log/entries.html", audit_log.entries, every=0),)
)


@operator_page()
def audit(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context = audit_log.page_context(ctx)
    return render_page(ctx, "operator/audit/page.html", _("Audit log"), panels=PANELS, **context)


@operator_page()
def entry(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        detail = audit_log.detail(ctx, ctx.arguments["pk"])
    breadcrumbs = (Breadcrumb(_("Audit log"), ctx.url("operator-audit")),)
    return render_page(ctx, "audit_log/detail.html", detail["entry"].label, breadcrumbs=breadcrumbs, **detail)


SCREEN = ConsoleScreen("operator-audit", _lazy("Audit log"), icon="audit", letter="a", group="governance", order=20)
urlpatterns = [
    path("operator/audit/", audit, name="operator-audit"),
    *audit_log.OPERATOR_TOOLS.operator_urls("operator/audit/"),
    path("operator/audit/<int:pk>", entry, name="operator-audit-detail"),
    PANELS.operator_url("operator/audit/"),
]
