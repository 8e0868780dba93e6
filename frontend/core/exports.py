"""Exports of a list with the filters of its page, as CSV or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.http import HttpResponse, JsonResponse

from frontend.core.lists import CURSORS, with_query
from frontend.core.page_context import PageContext
from tenants import csv_tables


def export_urls(ctx: PageContext, url: str) -> list[tuple[str, str]]:
    """Return the formats and URLs of an export with the page's filters."""
    params = {name: value for name, value in ctx.query.items() if name not in (*CURSORS, "format")}
    return [(label, with_query(url, **params, format=name)) for name, label in (("csv", "CSV"), ("json", "JSON"))]


def export_response(
    ctx: PageContext, name: str, heading: Sequence[str], rows: Iterable[Sequence[csv_tables.Value]]
) -> HttpResponse:
    """Return the rows in the format of the query string, CSV by default. `name` is the file's name without suffix."""
    response: HttpResponse
    if ctx.query.get("format") == "json":
        objects: list[dict[str, Any]] = [dict(zip(heading, row, strict=True)) for row in rows]
        response, suffix = JsonResponse(objects, safe=False), "json"
    else:
        text = csv_tables.as_csv(heading, rows)
        response, suffix = HttpResponse(text, content_type="text/csv; charset=utf-8"), "csv"
    response.headers["Content-Disposition"] = f'attachment; filename="{name}.{suffix}"'
    return response
