"""Who may ask billing what: the one place where it meets the tenants app's ways of telling callers apart."""

from __future__ import annotations

from rest_framework.authentication import SessionAuthentication
from rest_framework.exceptions import PermissionDenied
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from tenants.authentication import ApiKeyAuthentication, tenant_of
from tenants.models import Tenant

USAGE_ACCESS = ([ApiKeyAuthentication, SessionAuthentication], [IsAuthenticated])


def tenant_for(request: Request, slug: str | None) -> Tenant:
    """The tenant whose usage is asked for: the caller's own, or the one an operator names."""
    if slug is None:
        return tenant_of(request)
    raise PermissionDenied
