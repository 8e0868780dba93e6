"""Facts of requests for routing policies."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tenants.routing_policies.policy import RoutingFacts


def facts(**changes: Any) -> RoutingFacts:
    plain = RoutingFacts("req_1", 1, 100, False, False, datetime(2026, 11, 21, 12, 0, tzinfo=UTC))  # a Saturday
    return RoutingFacts(**{name: changes.get(name, getattr(plain, name)) for name in RoutingFacts.__dataclass_fields__})
