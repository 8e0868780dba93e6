"""The database's three roles, and every reason to see more than one tenant's rows. Free of Django.

owner: owns the tables and migrates; its row-level security is forced too, so even it sees no tenant by accident.
app: what every connection of the web processes starts as, and every test: it never bypasses row-level security.
system: bypasses it. Taken for one transaction at a time, and for nothing that is not listed in `BypassReason`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import LiteralString

from psycopg.conninfo import conninfo_to_dict, make_conninfo

APP = "millrace_app"
SYSTEM = "millrace_system"


class BypassReason(StrEnum):
    """Why rows of all tenants may be seen. Each is one place, or one kind of place, in the code."""

    ADMIN = "Django's admin below /operator/django-admin/"
    BATCHES = "web jobs read batches in and write their results out"
    BILLING = "periods are closed, numbers given and books kept for every tenant"
    BOOTSTRAP = "a fresh platform's operator and demo tenant"
    COMMAND = "an operator at the machine, with manage.py"
    HOUSEKEEPING = "beat: purge, expiry, partitions"
    INVITATION = "an invitation is found by its token, whosever it is"
    KEY_LOOKUP = "a key is found by its hash; whose it is, is what is asked"
    MEMBERSHIPS = "which tenants a person is a member of"
    OPERATOR = "operators see every tenant"
    PERSON = "a person's own login concerns no tenant"
    PRICES = "prices are published for every tenant; their preview reads everybody's usage"
    SETTLER = "the settler writes every tenant's usage"
    WEBHOOKS = "webhooks and mails of every tenant are sent"


# What must be there before the first migration. On a server of one's own a superuser, or a role that may create roles
# and bypasses row-level security itself, runs this once; `OWNER` is the role MILLRACE_DATABASE_URL logs in as.
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
    NULL;  -- another made them at this instant
END
$$
"""
GRANT_SQL = "GRANT millrace_app, millrace_system TO {owner} WITH INHERIT FALSE, SET TRUE"


def as_role(url: str, role: str) -> str:
    """Return the database URL as a libpq connection string whose sessions start in `role`."""
    options = str(conninfo_to_dict(url).get("options") or "")
    return make_conninfo(url, options=f"{options} -c role={role}".strip())
