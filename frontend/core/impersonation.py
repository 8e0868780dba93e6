"""Viewing as: an operator reads one tenant's console, for an hour at most, with an audit row at its start and end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.http import HttpRequest

from tenants import actions
from tenants.models import Tenant
from tenants.permissions import Permission

LASTS = timedelta(hours=1)
# What one may see meanwhile; nothing can be changed.
READING = frozenset(each for each in Permission if each.endswith(".read"))
_KEY = "viewing"


@dataclass(frozen=True)
class Viewing:
    """Whose console is read, and until when."""

    tenant_id: int
    slug: str
    name: str
    until: datetime


def viewing(request: HttpRequest) -> Viewing | None:
    """Return what this session views now."""
    kept = request.session.get(_KEY)
    if kept is None:
        return None
    until = datetime.fromtimestamp(kept["until"], UTC)
    if until <= datetime.now(UTC):
        return None
    return Viewing(kept["tenant_id"], kept["slug"], kept["name"], until)


def start(request: HttpRequest, tenant: Tenant, why: str) -> None:
    """View this tenant from now on, and no other.

    Raises:
        Conflict: it is gone.
    """
    end(request)
    until = datetime.now(UTC) + LASTS
    actions.do_start_viewing(tenant, until, why)
    kept = {"tenant_id": tenant.pk, "slug": tenant.slug, "name": tenant.name, "until": until.timestamp()}
    request.session[_KEY] = kept


def end(request: HttpRequest) -> Viewing | None:
    """View nobody any more; gives what was viewed. One that ran out has its end in the row of its start."""
    found = viewing(request)
    if found is not None:
        actions.do_end_viewing(found.tenant_id)
    request.session.pop(_KEY, None)
    return found
