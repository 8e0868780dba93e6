"""Batches: the list, one batch, the form of a new one, cancellation, and files."""

from __future__ import annotations

import os
from typing import Any

from django import forms
from django.core.files.uploadedfile import UploadedFile
from django.http import Http404, HttpResponse, StreamingHttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen, PaletteAction
from frontend.tenant.batches import page
from frontend.tenant.batches.forms import BatchForm, usable_keys
from millrace.apps.batches.actions import storage
from millrace.apps.batches.models import Batch, File
from millrace.apps.batches.tenant_actions import do_cancel_batch, do_create_batch, do_delete_file, do_upload_file
from tenants.file_responses import file_response
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST, REPORT_COST

# Files contain prompts and completions, and batches are billed to a key, like the requests of the playground.
READS, WRITES = Permission.USAGE_READ, Permission.KEYS_WRITE
PANELS = Panels(
    "batches-panel",
    (
        Panel("batches", _lazy("Batches"), "batches/page.html#list", page.batches, every=10),
        Panel("files", _lazy("Files"), "batches/page.html#files", page.files),
    ),
)
DETAIL_PANELS = Panels(
    "batches-detail-panel",
    (
        Panel("status", _lazy("Progress"), "batches/detail.html#status", page.status, every=5),
        Panel("errors", _lazy("Errors by line"), "batches/detail.html#errors", page.errors, every=10),
    ),
)


@tenant_page(READS)
def batches(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context = {"filters": page.filters(ctx), **page.TOOLS.page(ctx)}
    return render_page(ctx, "batches/page.html", _("Batches"), panels=PANELS, **context)


@tenant_page(READS)
def batch(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = page.batch_of(ctx)
    can_cancel = row.status in page.CANCELLABLE
    return render_page(
        ctx,
        "batches/detail.html",
        row.name,
        panels=DETAIL_PANELS,
        breadcrumbs=_breadcrumbs(ctx),
        batch=row,
        can_cancel=can_cancel,
    )


@tenant_page(WRITES, methods=FORM, step_up=False, cost=PAGE_COST)  # a suspended form would lose its file
def new_batch(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        keys = usable_keys(ctx)
        rows = File.objects.for_tenant(ctx.tenant).filter(purpose=File.Purpose.BATCH, is_internal=False)
        files = list(rows.filter(expires_at__gt=ctx.now).order_by("-pk")[: page.MAX_FILES])
    form = BatchForm(keys, files, bound_data(ctx), ctx.request.FILES or None, {"file": ctx.query.get("file", "")})

    def create(data: dict[str, Any]) -> Batch:
        key, upload = keys[data["key"]], data["upload"]
        name = data["file"]
        if isinstance(upload, UploadedFile):
            name = do_upload_file(key.project, upload.name or "", upload.chunks()).name
        return do_create_batch(ctx.tenant, name, key, data["endpoint"])

    return form_view(
        ctx,
        _("New batch"),
        form,
        create,
        submit=_("Create batch"),
        back=ctx.url("batches"),
        then=lambda made: ctx.url("batches-detail", made.name),
        message=lambda _result: _("Batch created"),
        breadcrumbs=_breadcrumbs(ctx),
        template="batches/page.html#form",
        has_keys=bool(keys),
    )


@tenant_page(WRITES, methods=FORM, step_up=False)
def cancel(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = page.batch_of(ctx)
    return form_view(
        ctx,
        _("Cancel batch"),
        forms.Form(bound_data(ctx)),
        lambda _: do_cancel_batch(row),
        submit=_("Cancel batch"),
        back=ctx.url("batches-detail", row.name),
        message=lambda _result: _("Batch cancelled"),
        effect=_("Requests that have not started are not run. Responses so far are kept and billed."),
        danger=True,
        breadcrumbs=_breadcrumbs(ctx),
    )


@tenant_page(WRITES, methods=FORM, step_up=False)
def delete_file(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        row = page.file_of(ctx)
    return form_view(
        ctx,
        _("Delete file"),
        forms.Form(bound_data(ctx)),
        lambda _: do_delete_file(row),
        submit=_("Delete file"),
        back=ctx.url("batches"),
        message=lambda _done: _("%(name)s was deleted.") % {"name": row.filename or row.name},
        effect=_("%(name)s is deleted permanently.") % {"name": row.filename or row.name},
        danger=True,
        breadcrumbs=_breadcrumbs(ctx),
    )


@tenant_page(WRITES)
def content(ctx: PageContext) -> StreamingHttpResponse:
    """Send a file at the speed at which the browser reads."""
    with ctx.scope():
        row = page.file_of(ctx)
    try:
        stored = storage().path(row.name).open("rb")
    except FileNotFoundError:
        raise Http404 from None
    size = os.fstat(stored.fileno()).st_size
    return file_response(stored, size, f"{row.name}.jsonl", "application/jsonl; charset=utf-8")


def _breadcrumbs(ctx: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb(_("Batches"), ctx.url("batches")),)


SCREEN = ConsoleScreen(
    "batches",
    _lazy("Batches"),
    icon="runs",
    letter="j",
    group="build",
    order=70,
    needs=Permission.USAGE_READ,
    actions=(PaletteAction(_lazy("Create batch"), "batches-new", "plus", Permission.KEYS_WRITE),),
)
urlpatterns = [
    path("t/<slug:slug>/batches/", batches, name="batches"),
    path("t/<slug:slug>/batches/new", new_batch, name="batches-new"),
    PANELS.tenant_url("t/<slug:slug>/batches/", READS),
    *page.TOOLS.tenant_urls("t/<slug:slug>/batches/", READS),
    path("t/<slug:slug>/batches/<str:batch>/", batch, name="batches-detail"),
    path("t/<slug:slug>/batches/<str:batch>/cancel", cancel, name="batches-cancel"),
    DETAIL_PANELS.tenant_url("t/<slug:slug>/batches/<str:batch>/", READS),
    path(
        "t/<slug:slug>/files/export",
        tenant_page(READS, cost=REPORT_COST)(page.FILE_TOOLS.export),
        name="batches-files-export",
    ),
    path("t/<slug:slug>/files/<str:file>/content", content, name="batches-file"),
    path("t/<slug:slug>/files/<str:file>/delete", delete_file, name="batches-file-delete"),
]
