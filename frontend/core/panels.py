"""Panels: parts of a page that load, refresh and fail independently."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import structlog
from django.http import Http404, HttpResponse
from django.template.loader import render_to_string
from django.urls import URLPattern, path
from django.utils.http import urlencode
from django.utils.safestring import SafeString

from frontend.core.page_context import PageContext, operator_page, tenant_page
from tenants.permissions import Permission
from tenants.request_costs import SIMPLE_COST

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Panel:
    """One part of a page. `build` returns its view model inside `ctx.scope()`; `template` receives it as `panel`."""

    name: str  # part of the URL and of the element's ID
    label: str  # for assistive technology and the error message
    template: str
    build: Callable[[PageContext], Any]
    every: int = 30  # seconds between refreshes; 0: never
    # Whether it is loaded after the first paint, because it is slow; a function: for some queries of the page.
    lazy: bool | Callable[[PageContext], bool] = False
    needs: Permission | None = None  # the panel is hidden without this permission


@dataclass(frozen=True)
class RenderedPanel:
    """A panel for the template tag. `body` is None for a lazy panel that is not loaded yet."""

    panel: Panel
    url: str
    body: SafeString | None
    failed: bool


class Panels:
    """The panels of one screen. `route` is the name of their URL."""

    def __init__(self, route: str, panels: Iterable[Panel]) -> None:
        self.route = route
        self._panels = {panel.name: panel for panel in panels}

    def first_paint(self, ctx: PageContext) -> dict[str, RenderedPanel]:
        """Return all panels that the user may see, by name."""
        seen = [panel for panel in self._panels.values() if ctx.may(panel.needs)]
        later = {panel for panel in seen if (panel.lazy(ctx) if callable(panel.lazy) else panel.lazy)}
        _build_together(ctx, [panel for panel in seen if panel not in later])
        return {panel.name: self._render(ctx, panel, later=panel in later) for panel in seen}

    def refresh(self, ctx: PageContext) -> HttpResponse:
        """Return the response to the refresh of one panel."""
        panel = self._panels.get(ctx.arguments["panel"])
        if panel is None or not ctx.may(panel.needs):
            raise Http404
        shown = self._render(ctx, panel, later=False)
        return HttpResponse(shown.body, status=500 if shown.failed else 200, headers={"X-Panel": panel.name})

    def tenant_url(
        self, prefix: str, needs: Permission = Permission.TENANT_READ, cost: int = SIMPLE_COST
    ) -> URLPattern:
        """Return the URL pattern of a tenant's panels. `prefix` is that of the screen: "t/<slug:slug>/usage/"."""
        return path(f"{prefix}panels/<slug:panel>", tenant_page(needs, cost=cost)(self.refresh), name=self.route)

    def operator_url(self, prefix: str) -> URLPattern:
        return path(f"{prefix}panels/<slug:panel>", operator_page()(self.refresh), name=self.route)

    def _render(self, ctx: PageContext, panel: Panel, *, later: bool) -> RenderedPanel:
        arguments = [value for name, value in ctx.arguments.items() if name != "panel"]
        url = ctx.url(self.route, *arguments, panel.name)
        if ctx.query:
            url = f"{url}?{urlencode(ctx.query)}"
        if later:
            return RenderedPanel(panel, url, None, failed=False)
        try:
            return RenderedPanel(panel, url, render(ctx, panel), failed=False)
        except Http404:  # its row was deleted, or is another tenant's
            raise
        except Exception:
            log.exception("panel_failed", panel=f"{self.route}/{panel.name}", request_id=ctx.request_id)
            context = {"panel": panel, "url": url, "request_id": ctx.request_id}
            return RenderedPanel(panel, url, render_to_string("frontend/parts/panel_failed.html", context), failed=True)


def _build_together(ctx: PageContext, panels: list[Panel]) -> None:
    """Build the panels in one transaction, which takes fewer statements. If one fails, `render` builds each of them."""
    built: dict[Hashable, Any] = {}
    try:
        with ctx.scope():
            for panel in panels:
                built[panel] = panel.build(ctx)
    except Exception:
        log.exception("panels_built_separately", request_id=ctx.request_id)
    else:
        ctx.known.update(built)


def render(ctx: PageContext, panel: Panel) -> SafeString:
    """Render the panel, in its own transaction if it is not built, so that a failure leaves the others intact."""
    if panel in ctx.known:
        model = ctx.known[panel]
    else:
        with ctx.scope():
            model = panel.build(ctx)
    return render_to_string(panel.template, {"panel": model, "ctx": ctx}, ctx.request)
