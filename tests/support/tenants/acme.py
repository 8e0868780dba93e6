"""The tenant of most tests, see the fixture `acme`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenants.models import Tenant


def make_acme(
    name: str = "Acme", *, months: bool = False, roles: Sequence[str] = (), password: str | None = None
) -> Tenant:
    """Create the tenant "acme".

    Args:
        months: whether usage of September to December 2026 can be stored.
        roles: the roles of its members, whose emails are ROLE@example.com.
        password: the members' password.
    """
    from tenants import actions  # here: imported before Django is set up
    from tenants.models import User
    from tests.support.billing.books import make_months

    if months:
        make_months()
    tenant = actions.do_create_tenant("acme", name)
    for role in roles:
        actions.do_add_member(tenant, User.objects.create_user(f"{role}@example.com", password), role)
    return tenant
