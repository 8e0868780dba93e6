"""The link to the notifications in the layout, with the number of unread ones."""

from __future__ import annotations

from dataclasses import dataclass

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from frontend.core.page_context import PageContext


@dataclass(frozen=True)
class Bell:
    """The link to the notifications of the page's tenant, or to those of operators.

    The number is read when the template shows it: then the page has opened its scope, which counts for operators.
    """

    ctx: PageContext
    url: str

    @property
    def unread(self) -> int:
        return self.ctx.count_unread()

    @property
    def label(self) -> str:
        """The name for assistive technology, which contains the number that is shown."""
        number = self.unread
        if not number:
            return _("Notifications")
        return ngettext("%(number)s unread notification", "%(number)s unread notifications", number) % {
            "number": number
        }


def bell_of(ctx: PageContext) -> Bell:
    """Return the link."""
    return Bell(ctx, ctx.url("notifications" if ctx.access is not None else "operator-notifications"))
