"""Panels: parts of a page that load, refresh and fail alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Panel:
    """One part of a page: `build` gives its view model, in the visit's scope, which `template` shows as `panel`."""

    name: str  # in the address, and the element's id
    label: str  # what assistive technology and the error call it
    template: str
    build: Callable[[PageContext], Any]
    every: int = 30  # seconds between refreshes; 0: never
    lazy: bool = False  # leave it out of the first paint: it is slow
    needs: Permission | None = None  # who may not, does not see it


@dataclass(frozen=True)
class RenderedPanel:
    """A panel as the template tag shows it. `body` is None for a lazy one that has not been asked for."""

    panel: Panel
    url: str
    body: SafeString | None
    failed: bool


class Panels:
    """The panels of one screen: `route` is the name of the address they are asked for at."""

    def __init__(self, route: str, panels: Iterable[Panel]) -> None:
        self.route = route
        self._panels = {panel.name: panel for panel in panels}

    def first_paint(self, visit: PageContext) -> dict[str, RenderedPanel]:
        """All panels the person may see, by name."""
        seen = (panel for panel in self._panels.values() if visit.may(panel.needs))
        return {panel.name: self._shown(visit, panel, first=True) for panel in seen}

    def refresh(self, visit: PageContext) -> HttpResponse:
        """Return the answer to one panel's asking for itself."""
        panel = self._panels.get(visit.arguments["panel"])
        if panel is None or not visit.may(panel.needs):
            raise Http404
        shown = self._shown(visit, panel, first=False)
        return HttpResponse(shown.body, status=500 if shown.failed else 200, headers={"X-Panel": panel.name})

    def tenant_url(self, prefix: str, needs: Permission = Permission.TENANT_READ) -> URLPattern:
        """Return the address of a tenant's panels; `prefix` is that of the screen: "t/<slug:slug>/usage/"."""
        return path(f"{prefix}panels/<slug:panel>", tenant_page(needs)(self.refresh), name=self.route)

    def operator_url(self, prefix: str) -> URLPattern:
        return path(f"{prefix}panels/<slug:panel>", operator_page()(self.refresh), name=self.route)

    def _shown(self, visit: PageContext, panel: Panel, *, first: bool) -> RenderedPanel:
        arguments = [value for name, value in visit.arguments.items() if name != "panel"]
        url = visit.url(self.route, *arguments, panel.name)
        if visit.query:
            url = f"{url}?{urlencode(visit.query)}"
        if first and panel.lazy:
            return RenderedPanel(panel, url, None, failed=False)
        try:
            return RenderedPanel(panel, url, render(visit, panel), failed=False)
        except Exception:
            log.exception("panel_failed", panel=f"{self.route}/{panel.name}", request_id=visit.request_id)
            context = {"panel": panel, "url": url, "request_id": visit.request_id}
            return RenderedPanel(panel, url, render_to_string("frontend/parts/panel_failed.html", context), failed=True)


def render(visit: PageContext, panel: Panel) -> SafeString:
    """Render the panel in its own transaction, so that a failure leaves the other panels intact."""
    with visit.scope():
        model = panel.build(visit)
    return render_to_string(panel.template, {"panel": model, "visit": visit}, visit.request)
