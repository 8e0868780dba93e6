"""Arguments of management commands."""

from __future__ import annotations

from django.core.management import CommandError

from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant


def tenant_of_slug(slug: str) -> Tenant:
    """Return the tenant with this slug.

    Raises:
        CommandError: it does not exist. The message lists the first tenants.
    """
    with all_tenants_scope(BypassReason.COMMAND):
        tenants = Tenant.objects.all_tenants()
        tenant = tenants.filter(slug=slug).first()
        known = ", ".join(tenants.order_by("slug").values_list("slug", flat=True)[:20])
    if tenant is None:
        raise CommandError(f"The tenant {slug!r} does not exist. Tenants: {known or 'none'}.")
    return tenant
