from __future__ import annotations

import pytest
import redis


@pytest.fixture
def broker(settler_broker: redis.Redis) -> redis.Redis:
    return settler_broker
