"""Impersonation: an operator reads one tenant's console for up to one hour. Start and end are in the audit log."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.http import HttpRequest

from tenants import actions
from tenants.models import Tenant
from tenants.permissions import Permission

MAX_DURATION = timedelta(hours=1)
# The permissions of an impersonation, which is read-only.
READ_PERMISSIONS = frozenset(permission for permission in Permission if permission.endswith(".read"))
_KEY = "viewing"


@dataclass(frozen=True)
class ImpersonationSession:
    """The tenant whose console is read, and the end of the session."""

    tenant_id: int
    slug: str
    name: str
    until: datetime


def impersonation_of(request: HttpRequest) -> ImpersonationSession | None:
    """Return the active impersonation of this session, or None."""
    stored = request.session.get(_KEY)
    if stored is None:
        return None
    until = datetime.fromtimestamp(stored["until"], UTC)
    if until <= datetime.now(UTC):
        return None
    return ImpersonationSession(stored["tenant_id"], stored["slug"], stored["name"], until)


def start(request: HttpRequest, tenant: Tenant, reason: str) -> None:
    """Start the impersonation of a tenant and end another one.

    Raises:
        Conflict: the tenant is deleted.
    """
    end(request)
    until = datetime.now(UTC) + MAX_DURATION
    actions.do_start_viewing(tenant, until, reason)
    stored = {"tenant_id": tenant.pk, "slug": tenant.slug, "name": tenant.name, "until": until.timestamp()}
    request.session[_KEY] = stored


def end(request: HttpRequest) -> ImpersonationSession | None:
    """End the impersonation and return it.

    An expired one gets no audit entry, because the entry of its start contains its end.
    """
    found = impersonation_of(request)
    if found is not None:
        actions.do_end_viewing(found.tenant_id)
    request.session.pop(_KEY, None)
    return found
