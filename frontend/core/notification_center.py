"""The list of notifications and the table of channels, for members of a tenant and for operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django import forms
from django.http import Http404, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from frontend.core.backend_messages import translate_message
from frontend.core.form_view import bound_data, form_view
from frontend.core.layout import Breadcrumb
from frontend.core.lists import Choice, ListPage, keyset_page, with_query
from frontend.core.page_context import PageContext
from frontend.core.rendering import redirect_with_message, render_page
from tenants import actions
from tenants.actions.notifications import ChosenChannels, channels_of
from tenants.models import Membership, Notification
from tenants.notifications.kinds import NOTIFICATION_KINDS, NotificationKind
from tenants.notifications.reading import (
    Viewer,
    count_unread,
    current_snapshot,
    mark_read,
    mark_seen,
    viewer_of,
    visible_notifications,
)

PAGE_SIZE = 50


@dataclass(frozen=True)
class NotificationPage:
    """A page of the list. `snapshot` names what it shows; `may_mark` is False for an operator who views a tenant."""

    page: ListPage
    unread: int
    snapshot: str
    may_mark: bool
    is_filtered: bool
    read_url: str


@dataclass(frozen=True)
class NotificationRow:
    """A notification with the label of its kind and the URL that marks it as read and leads to its object."""

    pk: int
    notification: Notification
    label: str
    url: str


def route_of(ctx: PageContext, name: str = "notifications") -> str:
    """Return the name of a URL of this screen."""
    return name if ctx.access is not None else f"operator-{name}"


def may_mark(ctx: PageContext) -> bool:
    """Return whether the user's own notifications are shown."""
    return ctx.access is None or ctx.access.role is not None


def find_notifications(ctx: PageContext) -> NotificationPage:
    """Return the notifications of the page. Call inside `ctx.scope()`."""
    viewer = viewer_of(ctx.user, ctx.access)
    rows = visible_notifications(viewer)
    is_filtered = ctx.query.get("show") == "unread"
    if is_filtered:
        rows = rows.filter(is_read=False)
    # NOTE: read before the rows. What commits between both is shown and stays unread.
    snapshot = current_snapshot()
    page = keyset_page(ctx, rows, ctx.url(route_of(ctx)), PAGE_SIZE, filtered=is_filtered)
    rows_shown = [_row(ctx, row) for row in page.rows]
    page = ListPage(rows_shown, page.newer_url, page.older_url, page.newest_url, filtered=is_filtered)
    return NotificationPage(
        page, count_unread(viewer), snapshot, may_mark(ctx), is_filtered, ctx.url(route_of(ctx, "notifications-read"))
    )


def _row(ctx: PageContext, row: Notification) -> NotificationRow:
    kind = NOTIFICATION_KINDS[row.kind]
    url = ctx.url(route_of(ctx, "notifications-open"), row.pk)
    return NotificationRow(row.pk, row, translate_message(kind.label), url)


def show_list(ctx: PageContext, panels: Any) -> HttpResponse:
    """Return the page of the list."""
    url = ctx.url(route_of(ctx))
    is_filtered = ctx.query.get("show") == "unread"
    shows = (
        Choice(_("All"), url, not is_filtered),
        Choice(_("Unread"), with_query(url, show="unread"), is_filtered),
    )
    return render_page(
        ctx,
        "notifications/page.html",
        _("Notifications"),
        panels=panels,
        shows=shows,
        channels_url=ctx.url(route_of(ctx, "notifications-channels")),
    )


def open_notification(ctx: PageContext, notification_id: int) -> HttpResponse:
    """Mark a notification as read and redirect to the page of its object.

    A request that another site causes marks nothing.
    """
    with ctx.scope():
        viewer = viewer_of(ctx.user, ctx.access)
        row = visible_notifications(viewer).filter(pk=notification_id).first()
        if row is None:
            raise Http404
        is_own = ctx.request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        if may_mark(ctx) and is_own and ctx.request.method == "GET":
            mark_read(viewer, [row.pk])
    base = ctx.url("overview" if ctx.access is not None else "operator-health")
    return HttpResponseRedirect(f"{base}{row.link}")


def mark_as_read(ctx: PageContext) -> HttpResponse:
    """Mark one notification as read, or all of those that a page of the list has shown."""
    seen = ctx.request.POST.get("seen", "")
    with ctx.scope():
        viewer = viewer_of(ctx.user, ctx.access)
        marked = _mark_seen(ctx, viewer, seen) if seen else mark_read(viewer, _posted_ids(ctx))
    text = ngettext("%(number)s notification marked as read.", "%(number)s notifications marked as read.", marked) % {
        "number": marked
    }
    return redirect_with_message(ctx, ctx.url(route_of(ctx)), text)


def _mark_seen(ctx: PageContext, viewer: Viewer, seen: str) -> int:
    try:
        return mark_seen(viewer, seen, ctx.now)
    except ValueError as exc:
        raise Http404 from exc


def _posted_ids(ctx: PageContext) -> list[int]:
    text = ctx.request.POST.get("notification", "")
    return [int(text)] if text.isascii() and text.isdigit() and len(text) < 19 else []


class ChannelsForm(forms.Form):
    """Two check boxes for each kind of notifications: in the console, and by email."""

    def __init__(self, channels: Sequence[tuple[NotificationKind, ChosenChannels]], data: Any = None) -> None:
        super().__init__(data)
        self.kinds = [kind for kind, _channels in channels]
        for kind, chosen in channels:
            label = translate_message(kind.label)
            self.fields[f"{kind.name}-console"] = _check_box(
                _("%(kind)s: in the console") % {"kind": label}, is_checked=chosen.in_console
            )
            self.fields[f"{kind.name}-email"] = _check_box(
                _("%(kind)s: by email") % {"kind": label}, is_checked=chosen.by_email
            )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The label and both fields of each kind."""
        return [
            {"label": kind.label, "console": self[f"{kind.name}-console"], "email": self[f"{kind.name}-email"]}
            for kind in self.kinds
        ]

    def read_channels(self) -> dict[str, ChosenChannels]:
        """Return the channels by kind of a valid form."""
        return {
            kind.name: ChosenChannels(
                self.cleaned_data[f"{kind.name}-console"], self.cleaned_data[f"{kind.name}-email"]
            )
            for kind in self.kinds
        }


def _check_box(label: str, *, is_checked: bool) -> forms.BooleanField:
    widget = forms.CheckboxInput(attrs={"aria-label": label})
    return forms.BooleanField(label=label, required=False, initial=is_checked, widget=widget)


def edit_channels(ctx: PageContext) -> HttpResponse:
    """Show and change the user's channels of each kind."""
    tenant = None if ctx.access is None else ctx.access.tenant
    role = None if ctx.access is None else ctx.access.role or Membership.Role.OWNER.value
    emails_off = False
    with ctx.scope():
        channels = channels_of(tenant, ctx.user, role)
        if tenant is not None:
            members = Membership.objects.for_tenant(tenant).filter(user=ctx.user, alert_emails=False)
            emails_off = members.exists()
    form = ChannelsForm(channels, bound_data(ctx))
    return form_view(
        ctx,
        _("Notification settings"),
        form,
        lambda _data: actions.do_set_notification_channels(tenant, ctx.user, form.read_channels()),
        submit=_("Save"),
        back=ctx.url(route_of(ctx)),
        message=lambda _saved: _("Notification settings saved."),
        template="notifications/page.html#channels",
        breadcrumbs=(Breadcrumb(_("Notifications"), ctx.url(route_of(ctx))),),
        may_save=may_mark(ctx),
        emails_off=emails_off,
    )
