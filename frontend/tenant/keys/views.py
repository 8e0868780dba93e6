"""API keys: the list, one key, and the actions on keys and projects."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from billing.metering.usage import count_accepted
from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.one_time_secrets import secret_form_view, take_secret
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.core.screens import ConsoleScreen, PaletteAction
from frontend.tenant.keys import detail, page
from frontend.tenant.keys.forms import (
    EditKeysForm,
    KeyForm,
    NewKeyForm,
    NewProjectForm,
    ProjectNameForm,
    RotationForm,
    SelectedKeysForm,
    revocation_effect,
)
from millrace.apps.deployments.model_obstacles import example_model
from tenants import actions
from tenants.actions.key_batches import do_update_api_keys
from tenants.models import ApiKey, Project
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST

PANELS = Panels(
    "keys-panel",
    (
        Panel("safety", _lazy("Safety"), "keys/page.html#safety", page.safety),
        Panel("keys", _lazy("API keys"), "keys/page.html#keys", page.keys),
        Panel(
            "projects", _lazy("Projects"), "keys/projects.html", page.projects, every=60, needs=Permission.PROJECTS_READ
        ),
    ),
)
DETAIL_PANELS = Panels(
    "keys-detail-panel",
    (
        Panel("stats", _lazy("Key figures"), "keys/detail.html#stats", detail.stats),
        Panel("limits", _lazy("Limits and budgets"), "keys/detail.html#limits", detail.limits, every=10),
        Panel("details", _lazy("Permissions"), "keys/detail.html#details", detail.permissions, every=60),
        Panel(
            "requests",
            _lazy("Latest requests"),
            "keys/detail.html#latest_requests",
            detail.latest_requests,
            every=10,
            needs=Permission.USAGE_READ,
        ),
        Panel(
            "history",
            _lazy("Changes"),
            "keys/detail.html#history",
            detail.history,
            every=60,
            needs=Permission.AUDIT_READ,
        ),
    ),
)


@tenant_page(Permission.KEYS_READ, cost=PAGE_COST)
def keys(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context = {"filters": page.filters(ctx), "metering": metering(ctx.now), **page.TOOLS.page(ctx)}
    return render_page(ctx, "keys/page.html", _("API keys"), panels=PANELS, **context)


@tenant_page(Permission.KEYS_READ, cost=PAGE_COST)
def key(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        header = detail.header(ctx)
    context = {"breadcrumbs": _crumbs(ctx), "metering": metering(ctx.now), **header}
    return render_page(ctx, "keys/detail.html", header["key"].name, panels=DETAIL_PANELS, **context)


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def new_key(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        projects = list(Project.objects.for_tenant(ctx.tenant).order_by("pk"))
        form = NewKeyForm(ctx, projects, bound_data(ctx))

    def make(data: dict[str, Any]) -> tuple[str, str]:
        project = next(row for row in projects if str(row.pk) == data["project"])
        row, secret = actions.do_create_api_key(project, **form.chosen(), created_by=ctx.user)
        return ctx.url("keys-secret", row.pk), secret

    return secret_form_view(ctx, _("New API key"), form, make, **_list_form(ctx, _("Create key")))


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def edit_key(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = _editable_key(ctx)
        form = KeyForm(ctx, bound_data(ctx), row)
    return form_view(
        ctx,
        _("Edit %(name)s") % {"name": row.name},
        form,
        lambda _: actions.do_update_api_key(row, **_changes(form)),
        message=lambda _done: _("%(name)s was updated.") % {"name": form.cleaned_data["name"]},
        **_key_form(ctx, row, _("Save"), _("Changes apply within a second.")),
    )


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

    def rotate(data: dict[str, Any]) -> tuple[str, str]:
        overlap = timedelta(hours=int(data["overlap"]))
        successor, secret = actions.do_rotate_api_key(row, overlap, created_by=ctx.user)
        return ctx.url("keys-secret", successor.pk), secret

    effect = _("Creates a new key with the same permissions and limits as %(name)s. The old key then expires.") % {
        "name": row.name
    }
    context = _key_form(ctx, row, _("Rotate"), effect)
    return secret_form_view(
        ctx, _("Rotate %(name)s") % {"name": row.name}, RotationForm(bound_data(ctx)), rotate, **context
    )


@tenant_page(Permission.KEYS_WRITE)
def key_secret(ctx: PageContext) -> HttpResponse:
    """Show the secret of a key that the user has just created. Later requests are redirected to the key."""
    with ctx.scope():
        row = _editable_key(ctx)
    url = ctx.url("keys-detail", row.pk)
    secret = take_secret(ctx) if ctx.request.method == "GET" else None
    if secret is None:
        message = _(
            "The secret of %(name)s was shown once and cannot be shown again. Rotate the key to get a new one."
        ) % {"name": row.name}
        return redirect_with_message(ctx, url, message)
    context: dict[str, Any] = {
        "row": row,
        "secret": secret,
        "model": row.allowed_models[0] if row.allowed_models else example_model(ctx.tenant.pk),
        "base_url": settings.MILLRACE.base_url,
        "url": url,
        "keys_url": ctx.url("keys"),
    }
    return render_page(ctx, "keys/page.html#secret", _("Save your key"), breadcrumbs=_crumbs(ctx), **context)


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def revoke_key(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = _editable_key(ctx)
        spent = page.spending(ctx, "key", [row.pk]).get(row.pk)
    return form_view(
        ctx,
        _("Revoke %(name)s") % {"name": row.name},
        Confirm(row.name, bound_data(ctx)),
        lambda _: actions.do_revoke_api_key(row),
        message=lambda _done: _("%(name)s was revoked.") % {"name": row.name},
        then=ctx.url("keys"),
        danger=True,
        **_key_form(ctx, row, _("Revoke key"), revocation_effect(row, count_accepted(spent) if spent else 0)),
    )


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def revoke_keys(ctx: PageContext) -> HttpResponse:
    """Revoke the keys that were selected in the list."""
    rows = _selected_keys(ctx)
    if not rows:
        return redirect_with_message(ctx, ctx.url("keys"), _("Select active keys first."), failed=True)
    number = len(rows)
    return form_view(
        ctx,
        ngettext("Revoke %(number)s key", "Revoke %(number)s keys", number) % {"number": number},
        SelectedKeysForm(rows, bound_data(ctx)),
        lambda _data: [actions.do_revoke_api_key(row) for row in rows],
        message=lambda _done: (
            ngettext("%(number)s key revoked.", "%(number)s keys revoked.", number) % {"number": number}
        ),
        then=ctx.url("keys"),
        danger=True,
        effect=_("They stop working immediately. This cannot be undone. Past usage is still billed."),
        **_list_form(ctx, _("Revoke keys")),
    )


@tenant_page(Permission.KEYS_WRITE, methods=FORM)
def edit_keys(ctx: PageContext) -> HttpResponse:
    """Change the keys that were selected in the list."""
    rows = _selected_keys(ctx)
    if not rows:
        return redirect_with_message(ctx, ctx.url("keys"), _("Select active keys first."), failed=True)
    form = EditKeysForm(ctx, rows, bound_data(ctx))
    number = len(rows)
    return form_view(
        ctx,
        ngettext("Edit %(number)s key", "Edit %(number)s keys", number) % {"number": number},
        form,
        lambda _data: do_update_api_keys(ctx.tenant, rows, form.limits(), **form.changes()),
        message=lambda done: ngettext("%(number)s key updated.", "%(number)s keys updated.", done) % {"number": done},
        effect=_("Blank fields change nothing, and other limits stay. If one key cannot be changed, none is."),
        **_list_form(ctx, _("Save")),
    )


def _selected_keys(ctx: PageContext) -> list[ApiKey]:
    """Return the selected keys that are not revoked.

    Raises:
        PermissionDenied: the user may not change one of them.
    """
    sent = ctx.request.POST if ctx.request.method == "POST" else ctx.request.GET
    wanted = {int(text) for text in sent.getlist("key") if text.isascii() and text.isdigit() and len(text) < 19}
    with ctx.scope():
        rows = list(ApiKey.objects.for_tenant(ctx.tenant).filter(pk__in=wanted, revoked_at=None)[: page.PAGE_SIZE])
    if not all(detail.may_change(ctx, row) for row in rows):
        raise PermissionDenied
    return rows


@tenant_page(Permission.PROJECTS_WRITE, methods=FORM)
def new_project(ctx: PageContext) -> HttpResponse:
    return form_view(
        ctx,
        _("New project"),
        NewProjectForm(bound_data(ctx)),
        lambda data: actions.do_create_project(ctx.tenant, data["slug"], data["name"]),
        message=lambda made: _("%(name)s was created.") % {"name": made.name},
        **_list_form(ctx, _("Create project")),
    )


@tenant_page(Permission.PROJECTS_WRITE, methods=FORM)
def edit_project(ctx: PageContext) -> HttpResponse:
    row = _project(ctx)
    return form_view(
        ctx,
        _("Rename %(name)s") % {"name": row.name},
        ProjectNameForm(bound_data(ctx), initial={"name": row.name}),
        lambda data: actions.do_update_project(row, name=data["name"]),
        message=lambda changed: _("Project renamed to %(name)s.") % {"name": changed.name},
        **_list_form(ctx, _("Rename")),
    )


@tenant_page(Permission.PROJECTS_WRITE, methods=FORM)
def delete_project(ctx: PageContext) -> HttpResponse:
    row = _project(ctx)
    return form_view(
        ctx,
        _("Delete %(name)s") % {"name": row.name},
        Confirm(row.name, bound_data(ctx)),
        lambda _: actions.do_delete_project(row),
        message=lambda _done: _("%(name)s was deleted.") % {"name": row.name},
        effect=_("Deletes %(name)s with its limits and budgets. Only projects that never had a key can be deleted.")
        % {"name": row.name},
        danger=True,
        **_list_form(ctx, _("Delete project")),
    )


def _editable_key(ctx: PageContext) -> ApiKey:
    """Return the key in the URL if the user may change it. Call inside `ctx.scope()`."""
    row = detail.key_of(ctx)
    if not detail.may_change(ctx, row):
        raise PermissionDenied
    return row


def _project(ctx: PageContext) -> Project:
    return ctx.get(lambda: Project.objects.for_tenant(ctx.tenant).filter(pk=ctx.arguments["project"]))


def _crumbs(ctx: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb(_("API keys"), ctx.url("keys")),)


def _list_form(ctx: PageContext, submit: str) -> dict[str, Any]:
    """Return the context of a form that leads back to the list."""
    return {"submit": submit, "back": ctx.url("keys"), "breadcrumbs": _crumbs(ctx)}


def _key_form(ctx: PageContext, row: ApiKey, submit: str, effect: str) -> dict[str, Any]:
    """Return the context of a form that leads back to the key."""
    back = ctx.url("keys-detail", row.pk)
    breadcrumbs = (*_crumbs(ctx), Breadcrumb(row.name, back))
    return {"submit": submit, "back": back, "breadcrumbs": breadcrumbs, "effect": effect}


SCREEN = ConsoleScreen(
    "keys",
    _lazy("API keys"),
    icon="keys",
    letter="k",
    group="build",
    order=10,
    needs=Permission.KEYS_READ,
    actions=(
        PaletteAction(_lazy("Create API key"), "keys-new", "plus", Permission.KEYS_WRITE, in_dialog=True),
        PaletteAction(_lazy("Create project"), "keys-project-new", "plus", Permission.PROJECTS_WRITE, in_dialog=True),
    ),
    finders={_lazy("API keys"): page.find_keys},
)
urlpatterns = [
    path("t/<slug:slug>/keys/", keys, name="keys"),
    path("t/<slug:slug>/keys/new", new_key, name="keys-new"),
    PANELS.tenant_url("t/<slug:slug>/keys/", Permission.KEYS_READ),
    *page.TOOLS.tenant_urls("t/<slug:slug>/keys/", Permission.KEYS_READ),
    path("t/<slug:slug>/keys/<int:key>/", key, name="keys-detail"),
    path("t/<slug:slug>/keys/<int:key>/edit", edit_key, name="keys-edit"),
    path("t/<slug:slug>/keys/<int:key>/rotate", rotate_key, name="keys-rotate"),
    path("t/<slug:slug>/keys/<int:key>/secret", key_secret, name="keys-secret"),
    path("t/<slug:slug>/keys/<int:key>/revoke", revoke_key, name="keys-revoke"),
    DETAIL_PANELS.tenant_url("t/<slug:slug>/keys/<int:key>/", Permission.KEYS_READ),
    path("t/<slug:slug>/keys/revoke", revoke_keys, name="keys-revoke-many"),
    path("t/<slug:slug>/keys/edit", edit_keys, name="keys-edit-many"),
    path("t/<slug:slug>/projects/new", new_project, name="keys-project-new"),
    path("t/<slug:slug>/projects/<int:project>/edit", edit_project, name="keys-project"),
    path("t/<slug:slug>/projects/<int:project>/delete", delete_project, name="keys-project-delete"),
]
