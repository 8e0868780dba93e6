"""Models that can serve requests, for tests that are about something else."""

from __future__ import annotations

from collections.abc import Collection

from tenants.routing_policies.target_checks import ModelObstacle


def serve_all(tenant_id: int, models: Collection[str], *, with_replicas: bool = False) -> dict[str, ModelObstacle]:
    """Return no obstacle, as if each model had a deployment and a price."""
    return {}
