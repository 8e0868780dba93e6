"""The tools of every list: saved views, a choice of columns, and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.urls import URLPattern, path
from django.utils import translation

from frontend.core.exports import export_response, export_urls
from frontend.core.lists import Choice, changed_url, text_param
from frontend.core.page_context import PageContext, operator_page, tenant_page
from frontend.core.saved_views import delete_view, save_view, saved_views
from tenants import csv_tables
from tenants.permissions import Permission
from tenants.request_costs import REPORT_COST

MAX_EXPORTED = 5000
View = tuple[str, Mapping[str, str]]
ExportedRows = Callable[[PageContext], Iterable[Sequence[csv_tables.Value]]]


@dataclass(frozen=True)
class ListTools:
    """The tools and the columns of one list.

    `screen` is the name of its URL. `columns` are those that can be hidden; labels are those of the tag `table`.
    `rows` returns the rows of an export, as `exported`, inside `ctx.scope()`. `views` are those that every user has.
    """

    screen: str
    exported: tuple[str, ...]
    rows: ExportedRows
    columns: Mapping[str, str]
    views: tuple[View, ...] = ()
    default: tuple[str, ...] = ()  # shown columns; empty: all

    def read_columns(self, ctx: PageContext) -> tuple[str, ...]:
        """Return the shown columns in their order. The query string has them if they are not the default."""
        wanted = text_param(ctx, "columns", 200).split(",")
        return tuple(name for name in self.columns if name in wanted) or self._default

    def headings(self, ctx: PageContext) -> list[str]:
        """Return the labels of the shown columns, for the tag `table`."""
        return [str(self.columns[name]) for name in self.read_columns(ctx)]

    def table(self, ctx: PageContext) -> dict[str, Any]:
        """Return the names and labels of the shown columns, for a panel or a `ListPage`."""
        return {"columns": self.read_columns(ctx), "headings": self.headings(ctx)}

    def page(self, ctx: PageContext) -> dict[str, Any]:
        """Return the context of the page around the list. Call inside `ctx.scope()`. Operators have no saved views."""
        context: dict[str, Any] = {
            "column_choices": self.column_choices(ctx),
            "export_urls": export_urls(ctx, ctx.url(f"{self.screen}-export")),
        }
        if ctx.access is not None:
            names = (f"{self.screen}-views-save", f"{self.screen}-views-delete")
            context["views"] = saved_views(ctx, self.screen, self.views, *names)
        return context

    def column_choices(self, ctx: PageContext) -> list[Choice]:
        """Return a link for each column that shows or hides it. One column always stays."""
        shown, url = self.read_columns(ctx), ctx.url(self.screen)
        found = []
        for name, label in self.columns.items():
            changed = tuple(other for other in self.columns if (other in shown) != (other == name))
            value = "" if changed in (self._default, ()) else ",".join(changed)
            found.append(Choice(str(label).lstrip("#!"), changed_url(ctx, url, columns=value), name in shown))
        return found

    def tenant_urls(self, prefix: str, needs: Permission) -> list[URLPattern]:
        """Return the URLs of the export and of saved views. `prefix` is that of the screen: "t/<slug:slug>/keys/"."""
        post = tenant_page(needs, methods=("POST",), step_up=False)
        return [
            path(f"{prefix}export", tenant_page(needs, cost=REPORT_COST)(self.export), name=f"{self.screen}-export"),
            path(f"{prefix}views/save", post(self.save), name=f"{self.screen}-views-save"),
            path(f"{prefix}views/delete", post(self.delete), name=f"{self.screen}-views-delete"),
        ]

    def operator_urls(self, prefix: str) -> list[URLPattern]:
        return [path(f"{prefix}export", operator_page(cost=REPORT_COST)(self.export), name=f"{self.screen}-export")]

    def export(self, ctx: PageContext) -> HttpResponse:
        """Return the newest rows with the page's filters, at most MAX_EXPORTED."""
        with ctx.scope(), translation.override("en"):
            rows = list(self.rows(ctx))
        owner = "" if ctx.access is None else f"-{ctx.tenant.slug}"
        return export_response(
            ctx, f"{self.screen.removeprefix('operator-')}{owner}-{ctx.now:%Y-%m-%d}", self.exported, rows
        )

    def save(self, ctx: PageContext) -> HttpResponse:
        return save_view(ctx, self.screen)

    def delete(self, ctx: PageContext) -> HttpResponse:
        return delete_view(ctx, self.screen)

    @property
    def _default(self) -> tuple[str, ...]:
        return self.default or tuple(self.columns)
