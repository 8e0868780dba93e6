"""API keys: the list, one key, and the actions on keys and projects."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.urls import path

from billing.metering.usage import accepted
from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.one_time_secrets import create_secret, take_secret
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_form_errors, render_page, run_action
from frontend.tenant.keys import detail, page
from frontend.tenant.keys.forms import (
    KeyForm,
    NewKeyForm,
    NewProjectForm,
    ProjectNameForm,
    RotationForm,
    revocation_effect,
)
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
DETAIL_PANELS = Panels(
    "keys-detail-panel",
    (
        Panel("stats", "Key figures", "keys/stats.html", detail.stats),
        Panel("limits", "Limits and budgets", "keys/limits.html", detail.limits, every=10),
        Panel("details", "Permissions", "keys/details.html", detail.permissions, every=60),
        Panel(
            "requests",
            "Latest requests",
            "keys/latest_requests.html",
            detail.latest_requests,
            every=10,
            needs=Permission.USAGE_READ,
        ),
        Panel("history", "Changes", "keys/history.html", detail.history, every=60, needs=Permission.AUDIT_READ),
    ),
)


@tenant_page(Permission.KEYS_READ)
def keys(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        filters = page.filters(ctx)
    new_url = ctx.url("keys-new") if ctx.may(Permission.KEYS_WRITE) else ""
    context: dict[str, Any] = {"filters": filters, "new_url": new_url, "metering": metering(ctx.now)}
    return render_page(ctx, "keys/page.html", "API keys", panels=PANELS, **context)


@tenant_page(Permission.KEYS_READ)
def key(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        header = detail.header(ctx)
    breadcrumbs = _crumbs(ctx)
    return render_page(
        ctx,
        "keys/detail.html",
        header.name,
        panels=DETAIL_PANELS,
        breadcrumbs=breadcrumbs,
        header=header,
        metering=metering(ctx.now),
    )


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def new_key(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        projects = list(Project.objects.for_tenant(ctx.tenant).order_by("pk"))
        form = NewKeyForm(ctx, projects, bound_data(ctx))
    context = _form_context(ctx, "Create key", ctx.url("keys"))

    def make(data: dict[str, Any]) -> tuple[str, str]:
        project = next(row for row in projects if str(row.pk) == data["project"])
        row, secret = actions.do_create_api_key(project, **form.chosen(), created_by=ctx.user)
        return ctx.url("keys-secret", row.pk), secret

    if ctx.request.method == "POST":
        if created := create_secret(ctx, form, make):
            return created
        return render_form_errors(ctx, "frontend/form.html", "New API key", form, **context)
    return render_page(ctx, "frontend/form.html", "New API key", form=form, **context)


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def edit_key(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = _editable_key(ctx)
        form = KeyForm(ctx, bound_data(ctx), row)
    back = ctx.url("keys-detail", row.pk)
    context = _form_context(ctx, "Save", back, effect="Changes apply within a second.", row=row)
    title = f"Edit {row.name}"
    if ctx.request.method == "POST":
        if run_action(form, lambda data: actions.do_update_api_key(row, **_changes(form))):
            return redirect_with_message(ctx, back, f"{form.cleaned_data['name']} was updated.")
        return render_form_errors(ctx, "frontend/form.html", title, form, **context)
    return render_page(ctx, "frontend/form.html", title, form=form, **context)


def _changes(form: KeyForm) -> dict[str, Any]:
    """Return the changed values. An unchanged expiry keeps its time of day."""
    chosen = form.chosen()
    if "expires_on" not in form.changed_data:
        del chosen["expires_at"]
    return chosen


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def rotate_key(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = _editable_key(ctx)
    form = RotationForm(bound_data(ctx))
    effect = f"Creates a new key with the same permissions and limits as {row.name}. The old key then expires."
    context = _form_context(ctx, "Rotate", ctx.url("keys-detail", row.pk), effect=effect, row=row)

    def rotate(data: dict[str, Any]) -> tuple[str, str]:
        overlap = timedelta(hours=int(data["overlap"]))
        successor, secret = actions.do_rotate_api_key(row, overlap, created_by=ctx.user)
        return ctx.url("keys-secret", successor.pk), secret

    if ctx.request.method == "POST":
        if created := create_secret(ctx, form, rotate):
            return created
        return render_form_errors(ctx, "frontend/form.html", f"Rotate {row.name}", form, **context)
    return render_page(ctx, "frontend/form.html", f"Rotate {row.name}", form=form, **context)


@tenant_page(Permission.KEYS_WRITE)
def key_secret(ctx: PageContext) -> HttpResponse:
    """Show the secret of a key that the user has just created. Later requests are redirected to the key."""
    with ctx.scope():
        row = _editable_key(ctx)
    url = ctx.url("keys-detail", row.pk)
    secret = take_secret(ctx) if ctx.request.method == "GET" else None
    if secret is None:
        message = f"The secret of {row.name} was shown once and cannot be shown again. Rotate the key to get a new one."
        return redirect_with_message(ctx, url, message)
    context: dict[str, Any] = {
        "row": row,
        "secret": secret,
        "model": (row.allowed_models or [model.name for model in settings.MILLRACE.models])[0],
        "base_url": settings.MILLRACE.base_url,
        "url": url,
        "keys_url": ctx.url("keys"),
    }
    return render_page(ctx, "keys/secret.html", "Save your key", breadcrumbs=_crumbs(ctx), **context)


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def revoke_key(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = _editable_key(ctx)
        spent = page.spending(ctx, "key").get(row.pk)
    effect = revocation_effect(row, accepted(spent) if spent else 0)
    form = Confirm(row.name, bound_data(ctx))
    back = ctx.url("keys-detail", row.pk)
    context = _form_context(ctx, "Revoke key", back, effect=effect, row=row) | {"danger": True}
    if ctx.request.method == "POST":
        if run_action(form, lambda data: actions.do_revoke_api_key(row)):
            return redirect_with_message(ctx, ctx.url("keys"), f"{row.name} was revoked.")
        return render_form_errors(ctx, "frontend/form.html", f"Revoke {row.name}", form, **context)
    return render_page(ctx, "frontend/form.html", f"Revoke {row.name}", form=form, **context)


@tenant_page(Permission.PROJECTS_WRITE, methods=FORM)
def new_project(ctx: PageContext) -> HttpResponse:
    form = NewProjectForm(bound_data(ctx))
    context = _form_context(ctx, "Create project", ctx.url("keys"))
    if ctx.request.method == "POST":
        if result := run_action(form, lambda data: actions.do_create_project(ctx.tenant, data["slug"], data["name"])):
            return redirect_with_message(ctx, ctx.url("keys"), f"{result.value.name} was created.")
        return render_form_errors(ctx, "frontend/form.html", "New project", form, **context)
    return render_page(ctx, "frontend/form.html", "New project", form=form, **context)


@tenant_page(Permission.PROJECTS_WRITE, methods=FORM)
def edit_project(ctx: PageContext) -> HttpResponse:
    row = _project(ctx)
    form = ProjectNameForm(bound_data(ctx), initial={"name": row.name})
    context = _form_context(ctx, "Rename", ctx.url("keys"))
    if ctx.request.method == "POST":
        if result := run_action(form, lambda data: actions.do_update_project(row, name=data["name"])):
            return redirect_with_message(ctx, ctx.url("keys"), f"Project renamed to {result.value.name}.")
        return render_form_errors(ctx, "frontend/form.html", f"Rename {row.name}", form, **context)
    return render_page(ctx, "frontend/form.html", f"Rename {row.name}", form=form, **context)


@tenant_page(Permission.PROJECTS_WRITE, methods=FORM)
def delete_project(ctx: PageContext) -> HttpResponse:
    row = _project(ctx)
    form = Confirm(row.name, bound_data(ctx))
    effect = f"Deletes {row.name} with its limits and budgets. Only projects that never had a key can be deleted."
    context = _form_context(ctx, "Delete project", ctx.url("keys"), effect=effect) | {"danger": True}
    if ctx.request.method == "POST":
        if run_action(form, lambda data: actions.do_delete_project(row)):
            return redirect_with_message(ctx, ctx.url("keys"), f"{row.name} was deleted.")
        return render_form_errors(ctx, "frontend/form.html", f"Delete {row.name}", form, **context)
    return render_page(ctx, "frontend/form.html", f"Delete {row.name}", form=form, **context)


def _editable_key(ctx: PageContext) -> ApiKey:
    """Return the key in the URL if the user may change it. Call inside `ctx.scope()`."""
    row = detail.key_of(ctx)
    if not detail.may_change(ctx, row):
        raise PermissionDenied
    return row


def _project(ctx: PageContext) -> Project:
    with ctx.scope():
        row = Project.objects.for_tenant(ctx.tenant).filter(pk=ctx.arguments["project"]).first()
    if row is None:
        raise Http404
    return row


def _crumbs(ctx: PageContext, row: ApiKey | None = None) -> tuple[Breadcrumb, ...]:
    found = (Breadcrumb("API keys", ctx.url("keys")),)
    return (*found, Breadcrumb(row.name, ctx.url("keys-detail", row.pk))) if row else found


def _form_context(
    ctx: PageContext, submit: str, back: str, *, effect: str = "", row: ApiKey | None = None
) -> dict[str, Any]:
    """Return the context of frontend/form.html."""
    breadcrumbs = _crumbs(ctx, row)
    context: dict[str, Any] = {
        "action": ctx.request.path,
        "submit": submit,
        "back": back,
        "breadcrumbs": breadcrumbs,
        "danger": False,
    }
    return context | {"effect": effect}


urlpatterns = [
    path("t/<slug:slug>/keys/", keys, name="keys"),
    path("t/<slug:slug>/keys/new", new_key, name="keys-new"),
    PANELS.tenant_url("t/<slug:slug>/keys/", Permission.KEYS_READ),
    path("t/<slug:slug>/keys/<int:key>/", key, name="keys-detail"),
    path("t/<slug:slug>/keys/<int:key>/edit", edit_key, name="keys-edit"),
    path("t/<slug:slug>/keys/<int:key>/rotate", rotate_key, name="keys-rotate"),
    path("t/<slug:slug>/keys/<int:key>/secret", key_secret, name="keys-secret"),
    path("t/<slug:slug>/keys/<int:key>/revoke", revoke_key, name="keys-revoke"),
    DETAIL_PANELS.tenant_url("t/<slug:slug>/keys/<int:key>/", Permission.KEYS_READ),
    path("t/<slug:slug>/projects/new", new_project, name="keys-project-new"),
    path("t/<slug:slug>/projects/<int:project>/edit", edit_project, name="keys-project"),
    path("t/<slug:slug>/projects/<int:project>/delete", delete_project, name="keys-project-delete"),
]
