from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis

from tenants import snapshot


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    """The tests' Valkey, empty."""
    client = redis.Redis.from_url(os.environ["MILLRACE_BROKER_URL"])
    client.flushdb()
    yield client
    client.close()


@pytest.fixture
def row():
    """What the data plane would read of a key."""

    def row(secret: str) -> snapshot.KeySnapshot:
        from tenants.models import KeySnapshot  # here: this file is read before Django is set up

        return KeySnapshot.objects.get(key_hash=snapshot.hash_key(secret)).decoded()

    return row
