"""The sessions of a user: a list of the devices, and their sign-out."""

from __future__ import annotations

from dataclasses import dataclass

from allauth.usersessions.models import UserSession
from django.http import HttpRequest
from django.utils.translation import gettext as _

from tenants import audit
from tenants.models import User

# The first match counts, because browsers name others, too.
_BROWSERS = (("Edg/", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
_SYSTEMS = (
    *(("iPhone", "iPhone"), ("iPad", "iPad"), ("Android", "Android"), ("Windows", "Windows")),
    *(("Mac OS X", "macOS"), ("CrOS", "ChromeOS"), ("Linux", "Linux")),
)


@dataclass(frozen=True)
class ListedSession:
    """A session with a description of its device."""

    row: UserSession
    device: str
    is_current: bool


def device_of(user_agent: str) -> str:
    """Return the browser and the system of a user agent, such as `Firefox on Windows`."""
    browser = next((name for part, name in _BROWSERS if part in user_agent), _("Unknown browser"))
    system = next((name for part, name in _SYSTEMS if part in user_agent), "")
    return _("%(browser)s on %(system)s") % {"browser": browser, "system": system} if system else browser


def sessions_of(request: HttpRequest, user: User) -> list[ListedSession]:
    """Return the user's sessions, this one first, then the newest. Ended ones are removed.

    A session from before this list existed is added when its user opens it.
    """
    if not UserSession.objects.filter(session_key=request.session.session_key).exists():
        UserSession.objects.create_from_request(request)
    rows = UserSession.objects.purge_and_list(user)
    current = request.session.session_key
    listed = [ListedSession(row, device_of(row.user_agent), row.session_key == current) for row in rows]
    return sorted(listed, key=lambda one: (one.is_current, one.row.created_at), reverse=True)


def end_sessions(request: HttpRequest, user: User, pk: int | None) -> int:
    """Sign out one other session of the user, or all others. Return how many were ended."""
    rows = UserSession.objects.filter(user_id=user.pk).exclude(session_key=request.session.session_key)
    found = list(rows if pk is None else rows.filter(pk=pk))
    for row in found:
        row.end()
    if found:
        audit.record_person("user.sessions_ended", user, after={"sessions": len(found)})
    return len(found)
