"""Transactions of billing's actions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant


@contextmanager
def booking(tenant_id: int) -> Iterator[Tenant]:
    """Open a transaction that changes the tenant's ledger, after any other such transaction.

    Unlike `locked_tenant`, it accepts a deleted tenant, whose last invoice is still to be issued and paid.
    """
    with all_tenants_scope(BypassReason.BILLING):
        yield Tenant.objects.all_tenants().select_for_update(no_key=True).get(pk=tenant_id)
