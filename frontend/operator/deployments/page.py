"""The deployments page, one function for each panel."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import redis
from django.conf import settings
from django.db import connection

from frontend.core.numbers import Margin, Money
from frontend.core.page_context import PageContext
from millrace.apps.operations.costs import ModelCost, costs
from millrace.apps.operations.deployment_status import DeploymentState, DeploymentStatus, deployment_status
from millrace.apps.operations.deployments import unpriced_names
from millrace.apps.operations.fleet_status import FleetStatus, read_fleet_status
from millrace.apps.operations.models import Deployment

HOUR = timedelta(hours=1)
RATE_SECONDS = 300
LABELS: Mapping[DeploymentState, tuple[str, str]] = {  # label and badge
    DeploymentState.READY: ("Ready", "good"),
    DeploymentState.UPDATING: ("Updating", "info"),
    DeploymentState.LOADING: ("Loading", "info"),
    DeploymentState.PENDING: ("No worker", "warn"),
    DeploymentState.DEGRADED: ("Degraded", "warn"),
    DeploymentState.FAILED: ("Failed", "bad"),
    DeploymentState.SCALED_TO_ZERO: ("Scaled to zero", ""),
    DeploymentState.DRAINING: ("Draining", "warn"),
    DeploymentState.DRAINED: ("Drained", "warn"),
    DeploymentState.UNLOADED: ("Unloaded", ""),
    DeploymentState.UNKNOWN: ("Unknown", "warn"),
}
_TRAFFIC = """
SELECT served_model, percentile_disc(0.95) WITHIN GROUP (ORDER BY ttft_ms)
FROM request_log_requestrecord WHERE started_at >= %s AND served_model <> '' GROUP BY served_model
"""
_TOKENS = """
WITH seen AS (
    SELECT model, prompt_tokens + generation_tokens - lag(prompt_tokens + generation_tokens) OVER w AS tokens
    FROM operations_replicasample WHERE sampled_at >= %s
    WINDOW w AS (PARTITION BY replica_id ORDER BY sampled_at)
)
SELECT model, coalesce(sum(tokens), 0) FROM seen GROUP BY model
"""


def statuses(ctx: PageContext) -> list[DeploymentStatus]:
    """Return the deployments with their states, computed once for all panels."""
    return ctx.once("deployments", _statuses)


def stats(ctx: PageContext) -> dict[str, Any]:
    found = statuses(ctx)
    states = [status.state for status in found]
    not_ready = [
        f"{states.count(state)} {LABELS[state][0].lower()}"
        for state in DeploymentState
        if state != DeploymentState.READY and state in states
    ]
    spent = _costs(ctx)
    known = [cost for cost in spent.values() if cost.cost is not None]
    below = [name for name, cost in spent.items() if _is_below_cost(cost)]
    return {
        "ready_of": f"{states.count(DeploymentState.READY)} of {len(found)}",
        "not_ready": ", ".join(not_ready),
        "tokens": sum(_token_rates(ctx).values()),
        "running": sum(status.running for status in found),
        "cost": Money(sum(cost.cost or 0 for cost in known)) if known else None,
        "below": below,
        "unpriced": sorted(unpriced_names(status.deployment.name for status in found)),
    }


def deployments(ctx: PageContext) -> dict[str, Any]:
    rates, spent = _token_rates(ctx), _costs(ctx)
    with connection.cursor() as cursor:
        cursor.execute(_TRAFFIC, [ctx.now - HOUR])
        ttft = dict(cursor.fetchall())
    found = statuses(ctx)
    unpriced = unpriced_names(status.deployment.name for status in found)
    rows = [
        _row(status, spent.get(status.deployment.name))
        | {
            "rate": rates.get(status.deployment.name, 0),
            "ttft_ms": ttft.get(status.deployment.name),
            "is_unpriced": status.deployment.name in unpriced,
        }
        for status in found
    ]
    return {"rows": rows, "objective_ms": settings.MILLRACE.ttft_slo_ms}


def _row(status: DeploymentStatus, cost: ModelCost | None) -> dict[str, Any]:
    label, badge = LABELS[status.state]
    price = None if cost is None else cost.price_per_million
    per_million = None if cost is None else cost.cost_per_million
    return {
        "status": status,
        "deployment": status.deployment,
        "label": label,
        "badge": badge,
        "cost": None if per_million is None else Money(per_million),
        "price": None if price is None else Money(price),
        "margin": None if per_million is None or not price else Margin(price, per_million),
        "can_load": status.deployment.state != "loaded",
        "can_drain": status.deployment.state == "loaded",
        "can_unload": status.deployment.state != "unloaded",
    }


def _is_below_cost(cost: ModelCost) -> bool:
    price, per_million = cost.price_per_million, cost.cost_per_million
    return price is not None and per_million is not None and price < per_million


def _statuses() -> list[DeploymentStatus]:
    board = board_or_none()
    return [deployment_status(row, board) for row in Deployment.objects.all()]


def board_or_none() -> FleetStatus | None:
    """Return the state of the fleet; None if Valkey is unavailable."""
    try:
        return read_fleet_status()
    except redis.RedisError:
        return None


def _costs(ctx: PageContext) -> dict[str, ModelCost]:
    """Return the costs of the last 24 hours by model."""
    return ctx.once("deployment-costs", lambda: {cost.model: cost for cost in costs(ctx.now - 24 * HOUR, ctx.now)})


def _token_rates(ctx: PageContext) -> dict[str, int]:
    """Return the tokens per second of the last minutes by model, prompts and completions together."""

    def read() -> dict[str, int]:
        with connection.cursor() as cursor:
            cursor.execute(_TOKENS, [ctx.now - timedelta(seconds=RATE_SECONDS + 60)])
            return {model: int(tokens) // RATE_SECONDS for model, tokens in cursor.fetchall()}

    return ctx.once("deployment-rates", read)
