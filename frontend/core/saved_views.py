"""Views of a list: those that every user has, and those that the user has saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from django.http import HttpResponse
from django.utils.translation import gettext as _

from frontend.core.backend_messages import translate_message
from frontend.core.lists import CURSORS, Choice, with_query
from frontend.core.page_context import PageContext
from frontend.core.rendering import redirect_with_message
from tenants import actions
from tenants.models import SavedView

# Parameters that are not part of a view: a view keeps the selected period.
_NOT_SAVED = (*CURSORS, "range", "from", "to", "compare", "live", "format")


@dataclass(frozen=True)
class SavedViews:
    """The tabs of a list, and the form that saves its filters. The URLs are empty for a read-only visitor."""

    tabs: tuple[Choice, ...]
    own: tuple[SavedView, ...]
    query: str
    save_url: str
    delete_url: str


def saved_views(
    ctx: PageContext, screen: str, builtin: Iterable[tuple[str, Mapping[str, str]]], save: str, delete: str
) -> SavedViews:
    """Return the views of a screen. Call inside `ctx.scope()`. `save` and `delete` are names of URLs."""
    url = ctx.url(screen)
    filters = {name: value for name, value in ctx.query.items() if name not in _NOT_SAVED and value}
    period = {name: ctx.query[name] for name in ("range", "from", "to", "live") if ctx.query.get(name)}
    own = tuple(SavedView.objects.for_tenant(ctx.tenant).filter(user=ctx.user, screen=screen))
    named: list[tuple[str, Mapping[str, str]]] = [*builtin, *((row.name, dict(parse_qsl(row.query))) for row in own)]
    tabs = tuple(Choice(label, with_query(url, **period, **query), dict(query) == filters) for label, query in named)
    may_save = ctx.access is not None and ctx.access.role is not None
    return SavedViews(
        tabs, own, urlencode(filters), ctx.url(save) if may_save else "", ctx.url(delete) if may_save else ""
    )


def save_view(ctx: PageContext, screen: str) -> HttpResponse:
    """Save the filters of the form as a view, and open it."""
    sent = ctx.request.POST
    # Parsed and written again, so that a view has only parameters.
    query = urlencode([(name, value) for name, value in parse_qsl(sent.get("query", "")) if name not in _NOT_SAVED])
    url = ctx.url(screen) + (f"?{query}" if query else "")
    try:
        row = actions.do_save_view(ctx.tenant, ctx.user, screen, sent.get("name", ""), query)
    except actions.ActionRefused as exc:
        return redirect_with_message(ctx, url, translate_message(exc), failed=True)
    return redirect_with_message(ctx, url, _("View %(name)s saved.") % {"name": row.name})


def delete_view(ctx: PageContext, screen: str) -> HttpResponse:
    """Delete a view of the user."""
    text = ctx.request.POST.get("view", "")
    if text.isascii() and text.isdigit() and len(text) < 19:
        actions.do_delete_view(ctx.tenant, ctx.user, int(text))
    return redirect_with_message(ctx, ctx.url(screen), _("View deleted."))
