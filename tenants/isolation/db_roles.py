"""The three roles of the database, and the reasons to bypass row-level security. Does not import Django.

owner: owns the tables and migrates them. Row-level security is forced, so it also applies to the owner.
app: the initial role of all connections of the web processes and tests. It never bypasses row-level security.
system: bypasses row-level security. It is set for one transaction, for a reason listed in `BypassReason`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import LiteralString

from psycopg.conninfo import conninfo_to_dict, make_conninfo

APP = "millrace_app"
SYSTEM = "millrace_system"


class BypassReason(StrEnum):
    """The reason why a transaction may see the rows of all tenants."""

    ADMIN = "Django's admin below /operator/django-admin/"
    BATCHES = "web jobs load batches and write their results"
    BILLING = "periods, invoice numbers and ledgers of all tenants"
    BOOTSTRAP = "the operator and the demo tenant of a new platform"
    CHARTS = "deployments and price versions, which a tenant cannot read, as marks of its charts"
    COMMAND = "an operator who runs an administration command"
    HOUSEKEEPING = "periodic jobs: purge, expiry, partitions"
    INVITATION = "the invitation of a token, of any tenant"
    KEY_LOOKUP = "the key with a hash, of any tenant"
    MEMBERSHIPS = "the memberships of a user"
    OPERATOR = "operators see all tenants"
    PERSON = "a user's login belongs to no tenant"
    PRICES = "prices of all tenants, and their preview from all usage"
    SETTLER = "the settler writes the usage of all tenants"
    WEBHOOKS = "deliveries and emails of all tenants"


# Required before the first migration. On an external server, a superuser, or a role that can create roles and bypasses
# row-level security, runs this once. `owner` is the login role of MILLRACE_DATABASE_URL.
ROLES_SQL: LiteralString = """
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'millrace_app') THEN
        CREATE ROLE millrace_app NOLOGIN NOBYPASSRLS;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'millrace_system') THEN
        CREATE ROLE millrace_system NOLOGIN BYPASSRLS;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL;  -- created concurrently by another process
END
$$
"""
GRANT_SQL = "GRANT millrace_app, millrace_system TO {owner} WITH INHERIT FALSE, SET TRUE"


def as_role(url: str, role: str) -> str:
    """Return the database URL as a libpq connection string whose sessions start in `role`."""
    options = str(conninfo_to_dict(url).get("options") or "")
    return make_conninfo(url, options=f"{options} -c role={role}".strip())
