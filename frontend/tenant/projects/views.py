"""Projects: the list and one project. Its forms are those of the keys' screen."""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.keys import page as keys_page
from frontend.tenant.projects import page
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST

NEEDS = Permission.PROJECTS_READ
LIST = Panels(
    "projects-panel", (Panel("projects", _lazy("Projects"), "keys/projects.html", keys_page.projects, every=60),)
)
DETAIL = Panels(
    "projects-detail-panel",
    (
        Panel("figures", _lazy("Key figures"), "projects/detail.html#figures", page.figures),
        Panel("keys", _lazy("API keys"), "projects/detail.html#keys", page.keys, needs=Permission.KEYS_READ),
        Panel("budgets", _lazy("Budgets"), "projects/detail.html#budgets", page.budgets, needs=Permission.LIMITS_READ),
    ),
)


@tenant_page(NEEDS)
def projects(ctx: PageContext) -> HttpResponse:
    return render_page(ctx, "projects/page.html", _("Projects"), panels=LIST)


@tenant_page(NEEDS, cost=PAGE_COST)
def project(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = page.project_of(ctx)
    breadcrumbs = (Breadcrumb(_("Projects"), ctx.url("projects")),)
    return render_page(ctx, "projects/detail.html", row.name, panels=DETAIL, breadcrumbs=breadcrumbs, project=row)


SCREEN = ConsoleScreen(
    "projects",
    _lazy("Projects"),
    icon="layers",
    letter="t",
    group="build",
    order=20,
    needs=Permission.PROJECTS_READ,
    finders={_lazy("Projects"): page.find_projects},
)
urlpatterns = [
    path("t/<slug:slug>/projects/", projects, name="projects"),
    LIST.tenant_url("t/<slug:slug>/projects/", NEEDS),
    path("t/<slug:slug>/projects/<int:project>/", project, name="projects-detail"),
    DETAIL.tenant_url("t/<slug:slug>/projects/<int:project>/", NEEDS),
]
