"""The command palette (Ctrl K) and its page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from django.http import HttpResponse
from django.utils.translation import gettext as _

from frontend.core.bell import bell_of
from frontend.core.navigation import screens_of, sections
from frontend.core.page_context import PageContext, operator_page, tenant_page
from frontend.core.rendering import render_page
from frontend.core.screens import MAX_RESULTS_PER_KIND, SearchResult


@dataclass(frozen=True)
class SearchResultGroup:
    """The results of one type."""

    kind: str
    hits: tuple[SearchResult, ...]


def _find_actions(ctx: PageContext, typed: str) -> Iterator[SearchResult]:
    """Yield actions whose label has every typed word."""
    words = typed.lower().split()
    for action in chain.from_iterable(screen.actions for screen in screens_of(ctx)):
        if ctx.may(action.needs) and all(word in action.label.lower() for word in words):
            yield SearchResult(action.label, ctx.url(action.route), action.icon, in_dialog=action.in_dialog)


def _find(ctx: PageContext, typed: str) -> Iterator[SearchResultGroup]:
    """Yield actions and the results of the screens' finders, in the order of the sidebar."""
    kinds: defaultdict[str, list[Iterable[SearchResult]]] = defaultdict(list)
    kinds[_("Actions")].append(_find_actions(ctx, typed))
    for screen in screens_of(ctx):
        if ctx.may(screen.needs):
            for kind, find in screen.finders.items():
                kinds[str(kind)].append(find(ctx, typed))
    for kind, results in kinds.items():
        yield SearchResultGroup(kind, tuple(islice(chain.from_iterable(results), MAX_RESULTS_PER_KIND)))


def _results(ctx: PageContext) -> tuple[SearchResultGroup, ...]:
    typed = ctx.query.get("q", "").strip()[:100]
    links = [link for section in sections(ctx) for link in section.links]
    pages = [SearchResult(link.label, link.url, link.icon, letter=link.letter) for link in links]
    pages.append(SearchResult(_("Notifications"), bell_of(ctx).url, "alerts"))  # without a link in the sidebar
    found = [SearchResultGroup(_("Pages"), tuple(page for page in pages if typed.lower() in page.label.lower()))]
    if typed:
        with ctx.scope():
            found += _find(ctx, typed)
    return tuple(hits for hits in found if hits.hits)


def _search(ctx: PageContext) -> HttpResponse:
    template = "frontend/parts/search_results.html" if ctx.is_fragment else "frontend/search.html"
    return render_page(ctx, template, _("Search"), found=_results(ctx), typed=ctx.query.get("q", ""))


tenant_search = tenant_page()(_search)
operator_search = operator_page()(_search)
