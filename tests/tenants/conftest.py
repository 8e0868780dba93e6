from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis

from millrace.conf.environment import platform_settings
from tenants.isolation.db_roles import BypassReason
from tenants.keys import snapshot


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    """The tests' Valkey, empty."""
    client = redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"])
    client.flushdb()
    yield client
    client.close()


def stored_hash(secret: str) -> bytes:
    return snapshot.hash_key(secret, platform_settings().key_peppers[0])


@pytest.fixture
def hashed():
    """What is stored of a key."""
    return stored_hash


@pytest.fixture
def row():
    """What the data plane would read of a key."""

    def row(secret: str) -> snapshot.ApiKeySnapshot:
        from tenants.isolation.scopes import all_tenants_scope
        from tenants.models import ApiKeySnapshotRow  # here: this file is read before Django is set up

        with all_tenants_scope(BypassReason.KEY_LOOKUP):
            return ApiKeySnapshotRow.objects.all_tenants().get(key_hash=stored_hash(secret)).decoded()

    return row


@pytest.fixture
def event():
    """A plausible usage event, as billing's tests make it."""
    from tests.billing.conftest import make_event

    return make_event
