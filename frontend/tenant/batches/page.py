"""Lists of batches and files, and one batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.db.models import Count, Q, QuerySet
from django.utils.translation import gettext as _

from frontend.core.exports import export_urls
from frontend.core.filter_chips import FilterBar, choice_chip, filter_bar
from frontend.core.labels import choice_label
from frontend.core.languages import lazy_text as _lazy
from frontend.core.list_tools import MAX_EXPORTED, ListTools
from frontend.core.lists import ListPage, keyset_page, named_rows, number_param
from frontend.core.numbers import share
from frontend.core.page_context import PageContext, first_or_404
from millrace.apps.batches.actions import LIVE, storage
from millrace.apps.batches.models import Batch, File, Line
from tenants.models import ApiKey, Project

PAGE_SIZE = 30
MAX_FILES = 50
MAX_LISTED_ERRORS = 50
_MAX_ERROR_BYTES = 2**18  # bytes of an error file that are read for the list of errors
KINDS: Mapping[str, str] = {
    Batch.Status.COMPLETED: "good",
    Batch.Status.FAILED: "bad",
    Batch.Status.EXPIRED: "warn",
    Batch.Status.CANCELLED: "",
}
CANCELLABLE = (Batch.Status.VALIDATING, Batch.Status.IN_PROGRESS)
_TENANTS_PURPOSES = (File.Purpose.BATCH, File.Purpose.BATCH_OUTPUT)


@dataclass(frozen=True)
class BatchProgress:
    """A batch with the number of its lines that have ended."""

    batch: Batch
    succeeded: int
    errored: int

    @property
    def ended(self) -> int:
        return self.succeeded + self.errored + self.batch.cancelled + self.batch.expired

    @property
    def percent(self) -> str:
        return share(self.ended, self.batch.total)

    @property
    def kind(self) -> str:
        """The color of the status."""
        return KINDS.get(self.batch.status, "info")

    @property
    def can_cancel(self) -> bool:
        return self.batch.status in CANCELLABLE


@dataclass(frozen=True)
class LineError:
    """The error of a line. `line` counts from 1; 0: unknown."""

    line: int
    custom_id: str
    status: str
    message: str


def filters(ctx: PageContext) -> FilterBar:
    """Return the filter chips. Call inside `ctx.scope()`."""
    url, status = ctx.url("batches"), ctx.query.get("status")
    projects = named_rows(Project.objects.for_tenant(ctx.tenant))
    statuses = [(value, choice_label(label)) for value, label in Batch.Status.choices]
    chosen = status if status in Batch.Status.values else None
    return filter_bar(
        ctx,
        url,
        (
            choice_chip(ctx, url, "status", _("Status"), statuses, chosen),
            choice_chip(ctx, url, "project", _("Project"), projects, number_param(ctx, "project")),
        ),
    )


def _select_batches(ctx: PageContext) -> QuerySet[Batch]:
    """Return the batches that the filters of the page select."""
    rows: QuerySet[Batch] = Batch.objects.for_tenant(ctx.tenant).filter(is_internal=False)
    if (status := ctx.query.get("status")) in Batch.Status.values:
        rows = rows.filter(status=status)
    if (project := number_param(ctx, "project")) is not None:
        rows = rows.filter(project_id=project)
    return rows


def export_rows(ctx: PageContext) -> Iterator[tuple[Any, ...]]:
    """Yield the newest batches with the page's filters. Call inside `ctx.scope()`."""
    for row in _progress(ctx, list(_select_batches(ctx).order_by("-pk")[:MAX_EXPORTED])):
        batch = row.batch
        times = (batch.created_at, batch.completed_at, batch.expires_at)
        yield (
            *(batch.name, batch.status, batch.endpoint, batch.project_id, batch.key_id, batch.total),
            *(row.succeeded, row.errored, batch.cancelled, batch.expired),
            *(at.isoformat() if at else None for at in times),
        )


TOOLS = ListTools(
    "batches",
    exported=(
        *("id", "status", "endpoint", "project_id", "key_id", "requests", "succeeded", "failed", "cancelled"),
        *("expired", "created_at", "completed_at", "expires_at"),
    ),
    rows=export_rows,
    columns={
        "status": _lazy("Status"),
        "progress": _lazy("Progress"),
        "failed": _lazy("#Failed"),
        "created": _lazy("Created"),
        "completed": _lazy("Completed"),
    },
    views=(
        (_lazy("All"), {}),
        (_lazy("In progress"), {"status": "in_progress"}),
        (_lazy("Failed"), {"status": "failed"}),
    ),
    default=("status", "progress", "failed", "created"),
)


def batches(ctx: PageContext) -> ListPage:
    """Return a page of batches, newest first."""
    filtered = any(ctx.query.get(name) for name in ("status", "project"))
    page = keyset_page(ctx, _select_batches(ctx), ctx.url("batches"), PAGE_SIZE, filtered=filtered)
    return replace(page, rows=_progress(ctx, page.rows), **TOOLS.table(ctx))


def _progress(ctx: PageContext, rows: Sequence[Batch]) -> list[BatchProgress]:
    """Return batches with their progress. The lines of unfinished ones are counted."""
    live = [row.pk for row in rows if row.status in LIVE]
    lines = Line.objects.for_tenant(ctx.tenant).filter(batch_id__in=live).order_by()
    counts = {
        pk: (good, bad)
        for pk, good, bad in lines.values("batch_id")
        .annotate(good=Count("pk", filter=Q(status__lt=400)), bad=Count("pk", filter=Q(status__gte=400)))
        .values_list("batch_id", "good", "bad")
    }
    return [BatchProgress(row, *counts.get(row.pk, (row.succeeded, row.errored))) for row in rows]


def _files(ctx: PageContext) -> QuerySet[File]:
    """Return the tenant's files that have not expired. Call inside `ctx.scope()`."""
    rows: QuerySet[File] = File.objects.for_tenant(ctx.tenant)
    return rows.filter(purpose__in=_TENANTS_PURPOSES, is_internal=False, expires_at__gt=ctx.now)


def export_files(ctx: PageContext) -> Iterator[tuple[Any, ...]]:
    """Yield the newest files. Call inside `ctx.scope()`."""
    for row in _files(ctx).order_by("-pk")[:MAX_EXPORTED]:
        times = (row.created_at.isoformat(), row.expires_at.isoformat())
        yield (row.name, row.filename, row.purpose, row.size, row.project_id, *times)


FILE_TOOLS = ListTools(
    "batches-files",
    exported=("id", "filename", "purpose", "bytes", "project_id", "created_at", "expires_at"),
    rows=export_files,
    columns={},
)


def files(ctx: PageContext) -> dict[str, Any]:
    """Return the newest files, and the URLs of their export."""
    rows = [{"file": row, "size": size_text(row.size)} for row in _files(ctx).order_by("-pk")[:MAX_FILES]]
    return {"rows": rows, "export_urls": export_urls(ctx, ctx.url("batches-files-export"))}


def size_text(size: int) -> str:
    """Return a size in bytes, kB or MB, rounded up."""
    for unit, name in ((10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{-(-size // unit):,} {name}"
    return _("%(size)s bytes") % {"size": size}


def batch_of(ctx: PageContext) -> Batch:
    """Return the batch in the URL. Call inside `ctx.scope()`."""
    name = ctx.arguments["batch"]
    rows = Batch.objects.for_tenant(ctx.tenant).filter(is_internal=False)
    return ctx.once(("batch", name), lambda: first_or_404(rows.filter(name=name[:64])))


def file_of(ctx: PageContext) -> File:
    """Return the file in the URL. Call inside `ctx.scope()`."""
    return first_or_404(_files(ctx).filter(name=ctx.arguments["file"][:64]))


def status(ctx: PageContext) -> dict[str, Any]:
    """Return the progress of the batch in the URL, with its key and files."""
    batch = batch_of(ctx)
    names = {_("Input"): batch.input_file, _("Output"): batch.output_file, _("Errors"): batch.error_file}
    rows = _files(ctx).filter(name__in=[name for name in names.values() if name])
    stored = {row.name: row for row in rows}
    keys = ApiKey.objects.for_tenant(ctx.tenant).filter(pk=batch.key_id)
    (progress,) = _progress(ctx, [batch])
    return {
        "progress": progress,
        "batch": batch,
        "key": keys.first(),
        "files": [(label, stored.get(name), name) for label, name in names.items() if name],
        "usage": batch.usage or {},
    }


def errors(ctx: PageContext) -> dict[str, Any]:
    """Return the errors of the batch's lines: of the input file, of running lines, or from the error file."""
    batch = batch_of(ctx)
    if batch.errors:
        rows = [
            LineError(error.get("line") or 0, "", str(error.get("code", "")), str(error.get("message", "")))
            for error in batch.errors
        ]
    elif batch.status in LIVE:
        found = Line.objects.for_tenant(ctx.tenant).filter(batch=batch, status__gte=400).order_by("number")
        rows = [
            LineError(line.number + 1, line.custom_id, str(line.status), _message(bytes(line.answer or b"")))
            for line in found[: MAX_LISTED_ERRORS + 1]
        ]
    else:
        rows = _errors_of_file(batch)
    return {"rows": rows[:MAX_LISTED_ERRORS], "is_cut": len(rows) > MAX_LISTED_ERRORS, "batch": batch}


def _errors_of_file(batch: Batch) -> list[LineError]:
    """Return the errors at the beginning of the error file; none if it was deleted."""
    if not batch.error_file:
        return []
    try:
        with storage().path(batch.error_file).open("rb") as file:
            text = file.read(_MAX_ERROR_BYTES)
    except OSError:
        return []
    lines = text.split(b"\n")[: MAX_LISTED_ERRORS + 2]
    return [found for line in lines if (found := _file_error(line)) is not None]


def _file_error(line: bytes) -> LineError | None:
    """Return the error of a line of the error file; None for a line that was cut."""
    try:
        row = json.loads(line)
        number = int(str(row["id"]).rpartition("_")[2]) + 1
        response = row.get("response")
        if response is None:
            error = row.get("error") or {}
            return LineError(number, str(row["custom_id"]), str(error.get("code", "")), str(error.get("message", "")))
        body = json.dumps(response.get("body")).encode()
        return LineError(number, str(row["custom_id"]), str(response.get("status_code", "")), _message(body))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _message(answer: bytes) -> str:
    """Return the message of an error's JSON body."""
    try:
        error = json.loads(answer)["error"]
        return str(error["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return ""
