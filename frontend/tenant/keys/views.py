"""API keys: the list, one key, and what is done to keys and projects."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.urls import path

from frontend.core.confirmation import Confirm
from frontend.core.form_view import posted
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import carry_out, done, refused, show
from frontend.tenant.keys import detail, page
from frontend.tenant.keys.forms import KeyForm, NewKey, NewProject, ProjectName, Rotation, revoking
from millrace.conf.environment import platform_settings
from tenants import actions
from tenants.models import ApiKey, Project
from tenants.permissions import Permission

PANELS = Panels(
    "keys-panel",
    (
        Panel("safety", "Safety", "keys/safety.html", page.safety),
        Panel("keys", "API keys", "keys/keys.html", page.keys),
        Panel("projects", "Projects", "keys/projects.html", page.projects, every=60, needs=Permission.PROJECTS_READ),
    ),
)
ONE = Panels(
    "keys-detail-panel",
    (
        Panel("stats", "Key figures", "keys/stats.html", detail.figures),
        Panel("limits", "Limits and budgets", "keys/limits.html", detail.bounds, every=10),
        Panel("details", "Permissions", "keys/details.html", detail.facts, every=60),
        Panel(
            "requests",
            "Latest requests",
            "keys/latest_requests.html",
            detail.latest,
            every=10,
            needs=Permission.USAGE_READ,
        ),
        Panel("history", "Changes", "keys/history.html", detail.history, every=60, needs=Permission.AUDIT_READ),
    ),
)


@tenant_page(Permission.KEYS_READ)
def keys(visit: PageContext) -> HttpResponse:
    with visit.scope():
        fields = page.fields(visit)
    new_url = visit.url("keys-new") if visit.may(Permission.KEYS_WRITE) else ""
    given: dict[str, Any] = {"fields": fields, "new_url": new_url, "metering": metering(visit.now)}
    return show(visit, "keys/page.html", "API keys", panels=PANELS, **given)


@tenant_page(Permission.KEYS_READ)
def key(visit: PageContext) -> HttpResponse:
    with visit.scope():
        head = detail.head(visit)
    breadcrumbs = _crumbs(visit)
    return show(
        visit,
        "keys/detail.html",
        head.name,
        panels=ONE,
        breadcrumbs=breadcrumbs,
        head=head,
        metering=metering(visit.now),
    )


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def new_key(visit: PageContext) -> HttpResponse:
    with visit.scope():
        projects = list(Project.objects.for_tenant(visit.tenant).order_by("pk"))
        form = NewKey(visit, projects, posted(visit))
    given = _given(visit, "Create key", visit.url("keys"))

    def make(data: dict[str, Any]) -> tuple[ApiKey, str]:
        project = next(row for row in projects if str(row.pk) == data["project"])
        return actions.do_create_api_key(project, **form.chosen(), created_by=visit.user)

    if visit.request.method == "POST":
        if carried := carry_out(form, make):
            return _secret(visit, *carried.value)
        return refused(visit, "frontend/form.html", "New API key", form, **given)
    return show(visit, "frontend/form.html", "New API key", form=form, **given)


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def edit_key(visit: PageContext) -> HttpResponse:
    with visit.scope():
        row = _changeable(visit)
        form = KeyForm(visit, posted(visit), row)
    back = visit.url("keys-detail", row.pk)
    given = _given(visit, "Save", back, effect="Changes apply within a second.", row=row)
    title = f"Edit {row.name}"
    if visit.request.method == "POST":
        if carry_out(form, lambda data: actions.do_update_api_key(row, **_changes(form))):
            return done(visit, back, f"{form.cleaned_data['name']} was updated.")
        return refused(visit, "frontend/form.html", title, form, **given)
    return show(visit, "frontend/form.html", title, form=form, **given)


def _changes(form: KeyForm) -> dict[str, Any]:
    """Return what was changed: an expiry that was left alone stays to the second."""
    chosen = form.chosen()
    if "expires_on" not in form.changed_data:
        del chosen["expires_at"]
    return chosen


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def rotate_key(visit: PageContext) -> HttpResponse:
    with visit.scope():
        row = _changeable(visit)
    form = Rotation(posted(visit))
    effect = f"Creates a new key with the same permissions and limits as {row.name}. The old key then expires."
    given = _given(visit, "Rotate", visit.url("keys-detail", row.pk), effect=effect, row=row)

    def rotate(data: dict[str, Any]) -> tuple[ApiKey, str]:
        return actions.do_rotate_api_key(row, timedelta(hours=int(data["overlap"])), created_by=visit.user)

    if visit.request.method == "POST":
        if carried := carry_out(form, rotate):
            return _secret(visit, *carried.value)
        return refused(visit, "frontend/form.html", f"Rotate {row.name}", form, **given)
    return show(visit, "frontend/form.html", f"Rotate {row.name}", form=form, **given)


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def revoke_key(visit: PageContext) -> HttpResponse:
    with visit.scope():
        row = _changeable(visit)
        spent = page.spending(visit, "key").get(row.pk)
    effect = revoking(row, spent["completed"] + spent["cancelled"] if spent else 0)
    form = Confirm(row.name, posted(visit))
    back = visit.url("keys-detail", row.pk)
    given = _given(visit, "Revoke key", back, effect=effect, row=row) | {"danger": True}
    if visit.request.method == "POST":
        if carry_out(form, lambda data: actions.do_revoke_api_key(row)):
            return done(visit, visit.url("keys"), f"{row.name} was revoked.")
        return refused(visit, "frontend/form.html", f"Revoke {row.name}", form, **given)
    return show(visit, "frontend/form.html", f"Revoke {row.name}", form=form, **given)


@tenant_page(Permission.PROJECTS_WRITE, methods=FORM)
def new_project(visit: PageContext) -> HttpResponse:
    form = NewProject(posted(visit))
    given = _given(visit, "Create project", visit.url("keys"))
    if visit.request.method == "POST":
        if carried := carry_out(form, lambda data: actions.do_create_project(visit.tenant, data["slug"], data["name"])):
            return done(visit, visit.url("keys"), f"{carried.value.name} was created.")
        return refused(visit, "frontend/form.html", "New project", form, **given)
    return show(visit, "frontend/form.html", "New project", form=form, **given)


@tenant_page(Permission.PROJECTS_WRITE, methods=FORM)
def edit_project(visit: PageContext) -> HttpResponse:
    row = _project(visit)
    form = ProjectName(posted(visit), initial={"name": row.name})
    given = _given(visit, "Rename", visit.url("keys"))
    if visit.request.method == "POST":
        if carried := carry_out(form, lambda data: actions.do_update_project(row, name=data["name"])):
            return done(visit, visit.url("keys"), f"Project renamed to {carried.value.name}.")
        return refused(visit, "frontend/form.html", f"Rename {row.name}", form, **given)
    return show(visit, "frontend/form.html", f"Rename {row.name}", form=form, **given)


@tenant_page(Permission.PROJECTS_WRITE, methods=FORM)
def remove_project(visit: PageContext) -> HttpResponse:
    row = _project(visit)
    form = Confirm(row.name, posted(visit))
    effect = f"Deletes {row.name} with its limits and budgets. Only projects that never had a key can be deleted."
    given = _given(visit, "Delete project", visit.url("keys"), effect=effect) | {"danger": True}
    if visit.request.method == "POST":
        if carry_out(form, lambda data: actions.do_delete_project(row)):
            return done(visit, visit.url("keys"), f"{row.name} was deleted.")
        return refused(visit, "frontend/form.html", f"Delete {row.name}", form, **given)
    return show(visit, "frontend/form.html", f"Delete {row.name}", form=form, **given)


def _changeable(visit: PageContext) -> ApiKey:
    """Return the key of the address, if the person may change it. In the visit's scope."""
    row = detail.key_of(visit)
    if not detail.may_change(visit, row):
        raise PermissionDenied
    return row


def _project(visit: PageContext) -> Project:
    with visit.scope():
        row = Project.objects.for_tenant(visit.tenant).filter(pk=visit.arguments["project"]).first()
    if row is None:
        raise Http404
    return row


def _secret(visit: PageContext, row: ApiKey, secret: str) -> HttpResponse:
    """Return the one answer that has the secret in it. It is kept nowhere, and no cache may."""
    given: dict[str, Any] = {
        "row": row,
        "secret": secret,
        "model": (row.allowed_models or [model.name for model in platform_settings().models])[0],
        "base_url": platform_settings().base_url,
        "url": visit.url("keys-detail", row.pk),
        "keys_url": visit.url("keys"),
    }
    return show(visit, "keys/secret.html", "Save your key", breadcrumbs=_crumbs(visit), **given)


def _crumbs(visit: PageContext, row: ApiKey | None = None) -> tuple[Breadcrumb, ...]:
    found = (Breadcrumb("API keys", visit.url("keys")),)
    return (*found, Breadcrumb(row.name, visit.url("keys-detail", row.pk))) if row else found


def _given(
    visit: PageContext, submit: str, back: str, *, effect: str = "", row: ApiKey | None = None
) -> dict[str, Any]:
    """Return what frontend/form.html wants."""
    breadcrumbs = _crumbs(visit, row)
    given: dict[str, Any] = {
        "action": visit.request.path,
        "submit": submit,
        "back": back,
        "breadcrumbs": breadcrumbs,
        "danger": False,
    }
    return given | {"effect": effect}


urlpatterns = [
    path("t/<slug:slug>/keys/", keys, name="keys"),
    path("t/<slug:slug>/keys/new", new_key, name="keys-new"),
    PANELS.tenant_url("t/<slug:slug>/keys/", Permission.KEYS_READ),
    path("t/<slug:slug>/keys/<int:key>/", key, name="keys-detail"),
    path("t/<slug:slug>/keys/<int:key>/edit", edit_key, name="keys-edit"),
    path("t/<slug:slug>/keys/<int:key>/rotate", rotate_key, name="keys-rotate"),
    path("t/<slug:slug>/keys/<int:key>/disable", revoke_key, name="keys-revoke"),
    ONE.tenant_url("t/<slug:slug>/keys/<int:key>/", Permission.KEYS_READ),
    path("t/<slug:slug>/projects/new", new_project, name="keys-project-new"),
    path("t/<slug:slug>/projects/<int:project>/edit", edit_project, name="keys-project"),
    path("t/<slug:slug>/projects/<int:project>/delete", remove_project, name="keys-project-remove"),
]
