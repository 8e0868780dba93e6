from __future__ import annotations

import pytest

from millrace.environment.configuration import platform_settings
from tenants.isolation.db_roles import BypassReason
from tenants.keys import snapshot


def stored_hash(secret: str) -> bytes:
    return snapshot.hash_key(secret, platform_settings().key_peppers[0])


@pytest.fixture
def hashed():
    """Return the stored hash of a key."""
    return stored_hash


@pytest.fixture
def row():
    """Return a function that gives a key's row as the data plane reads it."""

    def row(secret: str) -> snapshot.ApiKeySnapshot:
        from tenants.isolation.scopes import all_tenants_scope
        from tenants.models import ApiKeySnapshotRow  # here: imported before Django is set up

        with all_tenants_scope(BypassReason.KEY_LOOKUP):
            return ApiKeySnapshotRow.objects.all_tenants().get(key_hash=stored_hash(secret)).decode()

    return row
