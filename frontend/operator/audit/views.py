"""The audit log for operators: the list, and the drawer of one entry."""

from __future__ import annotations

from django.http import Http404, HttpResponse
from django.urls import path

from frontend.core import audit_log
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import show


def _log(visit: PageContext) -> audit_log.AuditLogPanel:
    return audit_log.log(visit, "operator-audit-detail")


PANELS = Panels("operator-audit-panel", (Panel("entries", "Changes", "audit_log/entries.html", _log, every=0),))


@operator_page()
def audit(visit: PageContext) -> HttpResponse:
    return show(visit, "operator/audit/page.html", "Audit log", panels=PANELS, fields=audit_log.fields(visit))


@operator_page()
def one(visit: PageContext) -> HttpResponse:
    with visit.scope():
        detail = audit_log.detail(visit, visit.arguments["pk"], "operator-audit-detail")
    if detail is None:
        raise Http404
    breadcrumbs = (Breadcrumb("Audit log", visit.url("operator-audit")),)
    return show(visit, "audit_log/detail.html", detail.entry.verb, breadcrumbs=breadcrumbs, detail=detail)


urlpatterns = [
    path("operator/audit/", audit, name="operator-audit"),
    path("operator/audit/<int:pk>", one, name="operator-audit-detail"),
    PANELS.operator_url("operator/audit/"),
]
