"""Permissions of roles and API keys in a tenant. Does not import Django."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Permission(StrEnum):
    """A right in a tenant."""

    TENANT_READ = "tenant.read"
    TENANT_UPDATE = "tenant.update"
    TENANT_DELETE = "tenant.delete"  # also restore
    MEMBERS_READ = "members.read"
    MEMBERS_WRITE = "members.write"
    OWNERS_WRITE = "owners.write"  # add, change and remove owners
    PROJECTS_READ = "projects.read"
    PROJECTS_WRITE = "projects.write"
    KEYS_READ = "keys.read"
    KEYS_WRITE = "keys.write"
    KEYS_MANAGE = "keys.manage"  # keys with the scope `manage`
    LIMITS_READ = "limits.read"
    LIMITS_WRITE = "limits.write"
    POLICIES_READ = "policies.read"
    POLICIES_WRITE = "policies.write"
    USAGE_READ = "usage.read"
    BILLING_READ = "billing.read"
    BILLING_WRITE = "billing.write"
    AUDIT_READ = "audit.read"
    WEBHOOKS_READ = "webhooks.read"  # including events, which contain invoices
    WEBHOOKS_WRITE = "webhooks.write"
    CREDENTIALS_READ = "credentials.read"
    CREDENTIALS_WRITE = "credentials.write"


P = Permission
EVERYTHING = frozenset(Permission)
_READ = {P.TENANT_READ, P.MEMBERS_READ, P.PROJECTS_READ, P.LIMITS_READ, P.USAGE_READ}
_ADMIN = EVERYTHING - {P.TENANT_DELETE, P.OWNERS_WRITE, P.BILLING_WRITE}

ROLES: Mapping[str, frozenset[Permission]] = {
    "owner": EVERYTHING,
    "admin": _ADMIN,
    "developer": frozenset({*_READ, P.KEYS_READ, P.KEYS_WRITE, P.POLICIES_READ, P.POLICIES_WRITE}),
    "billing": frozenset({*_READ, P.BILLING_READ, P.BILLING_WRITE, P.WEBHOOKS_READ}),
    "readonly": frozenset({*_READ, P.KEYS_READ, P.POLICIES_READ}),
}
# Permissions of a key with the scope `manage`. It cannot create such keys, so revoking a leaked key is enough.
KEY: frozenset[Permission] = _ADMIN - {P.KEYS_MANAGE}
# The management API accepts keys with these scopes, and gives them these permissions.
KEY_SCOPES: Mapping[str, frozenset[Permission]] = {"manage": KEY, "billing": ROLES["billing"]}
# Permissions that a caller needs to create, change or rotate a key with the scope. Other scopes need KEYS_WRITE only.
SCOPE_NEEDS: Mapping[str, Permission] = {"manage": P.KEYS_MANAGE, "billing": P.BILLING_WRITE}
# Permissions that require a recent reauthentication by password or TOTP. API keys are exempt.
STEP_UP = frozenset(
    {
        *(P.TENANT_DELETE, P.MEMBERS_WRITE, P.OWNERS_WRITE, P.KEYS_WRITE, P.KEYS_MANAGE, P.BILLING_WRITE),
        *(P.LIMITS_WRITE, P.WEBHOOKS_WRITE, P.CREDENTIALS_WRITE),
    }
)
