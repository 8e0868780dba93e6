"""The stamp of a prepared database. `millrace up` skips `millrace manage prepare` if it would change nothing.

The preparation depends on the code, the settings and the rows that it reads. The stamp is a digest of them. A
preparation stores it as the comment of Django's table of migrations. The next start computes it again from what the
database then contains, so a change of the code, of a setting or of these rows is found. A restore is found too: the
restored tables have other object IDs, and the comment is that of the backup.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import psycopg
import redis
from psycopg import sql

from inference_worker.contract.deployments import WANTED_KEY
from inference_worker.contract.valkey import SUPERVISOR, connect
from millrace.environment.configuration import PlatformSettings
from tenants.isolation.db_roles import SYSTEM

_PACKAGES = ("billing", "frontend", "inference_worker", "millrace", "tenants")
_SUFFIXES = (".py", ".sql")
# What the preparation reads: tables with their privileges, migrations, accounts, deployments and models with prices.
# Partitions are left out, since jobs create them.
_STATE = """
SELECT coalesce(string_agg(line, E'\\n' ORDER BY line), '') FROM (
    SELECT concat_ws(' ', 'table', oid, relname, relacl) FROM pg_class
        WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'v') AND NOT relispartition
    UNION ALL SELECT concat_ws(' ', 'migration', app, name) FROM django_migrations
    UNION ALL SELECT concat_ws(' ', 'user', id, email, is_active, is_staff) FROM tenants_user
        WHERE is_staff OR email = ANY(%(emails)s)
    UNION ALL SELECT concat_ws(' ', 'tenant', id, is_demo, status, purge_after) FROM tenants_tenant
    UNION ALL SELECT concat_ws(' ', 'key', k.id, k.key_hash, k.pepper, k.revoked_at, k.expires_at <= now())
        FROM tenants_apikey k JOIN tenants_tenant t ON t.id = k.tenant_id WHERE t.is_demo OR k.pepper = ''
    UNION ALL SELECT concat_ws(' ', 'deployment', d) FROM operations_deployment d
    UNION ALL SELECT concat_ws(' ', 'removed', r) FROM operations_removeddeployment r
    UNION ALL SELECT concat_ws(' ', 'book', id, name) FROM billing_pricebook
    UNION ALL SELECT DISTINCT concat_ws(' ', 'price', book_id, model, tier) FROM billing_price WHERE tenant_id IS NULL
) lines(line)
"""
_READ = "SELECT obj_description('django_migrations'::regclass, 'pg_class')"


class Preparation:
    """The preparation of the database for the settings of one start."""

    def __init__(self, settings: PlatformSettings, credentials: Path) -> None:
        self._settings = settings
        self._credentials = credentials

    def find_accounts(self) -> dict[str, Any] | None:
        """Return the accounts of the last preparation, or None if the database must be prepared."""
        try:
            with psycopg.connect(self._settings.database_url, connect_timeout=5) as connection:
                row = connection.execute(_READ).fetchone()
                stored = json.loads(row[0]) if row and row[0] else {}
                if stored.get("stamp") != self._compute_stamp(connection):
                    return None
        except (psycopg.Error, redis.RedisError, ValueError, OSError, AttributeError):
            return None  # such as a new database
        accounts = self._read_credentials()
        return {name: accounts[name] for name in stored["accounts"]}

    def store(self, accounts: Collection[str]) -> None:
        """Store the stamp of the prepared database and the names of the accounts that exist.

        If this fails, such as without the privilege to comment on the table, the next start prepares again.
        """
        owner_url = self._settings.migration_database_url or self._settings.database_url
        try:
            with psycopg.connect(self._settings.database_url, connect_timeout=5) as connection:
                stored = json.dumps({"stamp": self._compute_stamp(connection), "accounts": sorted(accounts)})
            with psycopg.connect(owner_url, connect_timeout=5) as connection:
                connection.execute(sql.SQL("COMMENT ON TABLE django_migrations IS {}").format(stored))
        except (psycopg.Error, redis.RedisError, ValueError, OSError):
            return

    def _compute_stamp(self, connection: psycopg.Connection) -> str:
        accounts = self._read_credentials()
        emails = [accounts.get(name, "") for name in ("operator_email", "owner_email")]
        with connection.transaction():
            connection.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(SYSTEM)))
            row = connection.execute(_STATE, {"emails": emails}).fetchone()
        with connect(self._settings.valkey_url, SUPERVISOR) as broker:
            deployments: Any = broker.get(WANTED_KEY)  # the copy that the preparation repairs
        digest = hashlib.sha256()
        for part in (*_code_parts(), *_setting_parts(self._settings), str(row).encode(), deployments or b""):
            digest.update(len(part).to_bytes(8, "little") + part)
        digest.update(self._credentials.read_bytes() if self._credentials.exists() else b"")
        return digest.hexdigest()

    def _read_credentials(self) -> dict[str, Any]:
        try:
            accounts = json.loads(self._credentials.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return accounts if isinstance(accounts, dict) else {}


def _setting_parts(settings: PlatformSettings) -> Iterator[bytes]:
    for field in fields(settings):
        value = getattr(settings, field.name)
        yield f"{field.name}={sorted(value) if isinstance(value, frozenset) else value!r}".encode()


def _code_parts() -> Iterator[bytes]:
    """Yield the interpreter, the installed packages and the sources of the platform."""
    yield sys.version.encode()
    installed = {name for path in filter(os.path.isdir, sys.path) for name in os.listdir(path)}
    yield "\0".join(sorted(name for name in installed if name.endswith(".dist-info"))).encode()
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            for directory, subdirectories, names in os.walk(place):
                subdirectories.sort()
                for name in sorted(names):
                    if name.endswith(_SUFFIXES):
                        path = os.path.join(directory, name)
                        yield os.path.relpath(path, place).encode()
                        yield Path(path).read_bytes()
