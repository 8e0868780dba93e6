"""The list of keyboard shortcuts, which `?` opens."""

from __future__ import annotations

from django.http import HttpResponse
from django.utils.translation import gettext as _

from frontend.core.navigation import sections
from frontend.core.page_context import PageContext, operator_page, tenant_page
from frontend.core.rendering import render_page


def _shortcuts(ctx: PageContext) -> HttpResponse:
    links = [link for section in sections(ctx) for link in section.links if link.letter]
    return render_page(ctx, "frontend/shortcuts.html", _("Keyboard shortcuts"), links=links)


tenant_shortcuts = tenant_page()(_shortcuts)
operator_shortcuts = operator_page()(_shortcuts)
