"""Unfinished work of a settler: pending messages and quarantined events."""

from __future__ import annotations

import redis

from billing.models import UsageQuarantine
from inference_worker.contract.messages import USAGE_GROUP, USAGE_STREAM
from tests.support.rows import unscoped


def pending(broker: redis.Redis) -> int:
    return int(broker.xpending(USAGE_STREAM, USAGE_GROUP)["pending"])


def quarantined() -> list[tuple[str, bytes]]:
    return [(item.reason, bytes(item.payload)) for item in unscoped(UsageQuarantine).order_by("id")]
