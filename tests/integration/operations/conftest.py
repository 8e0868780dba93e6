from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from inference_worker.contract.messages import HEARTBEAT_TTL_MS, REPLICAS_KEY, beat_key, encode
from tests.support.operations.heartbeats import heartbeat


@pytest.fixture
def speak(broker: redis.Redis) -> Callable[..., None]:
    """Return a function that writes a replica's heartbeat of this age in milliseconds."""

    def speak(replica_id: str, age_ms: int = 0, **changes: Any) -> None:
        broker.hset(REPLICAS_KEY, replica_id, encode(heartbeat(**changes)))
        broker.set(beat_key(replica_id), "", px=HEARTBEAT_TTL_MS - age_ms)

    return speak
