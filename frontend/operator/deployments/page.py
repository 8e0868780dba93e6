"""The deployments page, one function for each panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import redis
from django.conf import settings
from django.db import connection
from django.db.models import Sum
from django.utils.translation import gettext as _

from billing.models import DailyCost
from frontend.core.languages import in_sentence
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import Choice, changed_url, text_param
from frontend.core.numbers import Margin, Money, common_places
from frontend.core.page_context import PageContext
from frontend.core.shared_values import SharedValue
from inference_worker.contract.upstream_presets import preset_of
from inference_worker.contract.upstreams import UpstreamEngine
from millrace.apps.deployments.deployment_status import DeploymentState, DeploymentStatus, deployment_status
from millrace.apps.deployments.fleet_status import FleetStatus, read_fleet_status
from millrace.apps.deployments.models import Deployment
from millrace.apps.deployments.offered_prices import unpriced_names
from millrace.apps.deployments.upstream_limits import UpstreamLimits, read_upstream_limits
from millrace.apps.health.costs import ModelCost, costs
from tenants.models import UpstreamCredential

HOUR, HOUR_MINUTES = timedelta(hours=1), 60
RATE_MINUTES, TREND_MINUTES = 5, 2  # minutes of the rate, and of a point of its trend
MIN_FAILING_SHARE = 5  # an upstream is failing if one of this many requests fails
LABELS: Mapping[DeploymentState, tuple[str, str]] = {  # label and badge
    DeploymentState.READY: (_lazy("Ready"), "good"),
    DeploymentState.UPDATING: (_lazy("Updating"), "info"),
    DeploymentState.LOADING: (_lazy("Loading"), "info"),
    DeploymentState.PENDING: (_lazy("No worker"), "warn"),
    DeploymentState.DEGRADED: (_lazy("Degraded"), "warn"),
    DeploymentState.FAILED: (_lazy("Failed"), "bad"),
    DeploymentState.SCALED_TO_ZERO: (_lazy("Scaled to zero"), ""),
    DeploymentState.DRAINING: (_lazy("Draining"), "warn"),
    DeploymentState.DRAINED: (_lazy("Drained"), "warn"),
    DeploymentState.UNLOADED: (_lazy("Unloaded"), ""),
    DeploymentState.UNKNOWN: (_lazy("Unknown"), "warn"),
}
_TRAFFIC = """
SELECT served_model, percentile_disc(0.95) WITHIN GROUP (ORDER BY ttft_ms)
FROM request_log_requestrecord WHERE started_at >= %s AND served_model <> '' GROUP BY served_model
"""
# Requests of the last hour by model: all, failed, without capacity at the upstream, and the most frequent error code.
_UPSTREAM_ERRORS = """
SELECT served_model, count(*), count(*) FILTER (WHERE code LIKE 'upstream%%'),
    count(*) FILTER (WHERE code = 'server_is_overloaded'),
    coalesce(mode() WITHIN GROUP (ORDER BY code) FILTER (WHERE code <> ''), '')
FROM request_log_requestrecord WHERE started_at >= %s AND served_model = ANY(%s) GROUP BY served_model
"""
_TOKENS = """
WITH seen AS (
    SELECT model, sampled_at,
        prompt_tokens + generation_tokens - lag(prompt_tokens + generation_tokens) OVER w AS tokens
    FROM operations_replicasample WHERE sampled_at >= %s
    WINDOW w AS (PARTITION BY replica_id ORDER BY sampled_at)
)
SELECT model, floor(extract(epoch FROM %s - sampled_at) / 60)::int AS minute, sum(tokens)
FROM seen WHERE tokens > 0 GROUP BY model, minute
"""


_PAGE = "operator-deployments"


def _read_ttft(now: datetime) -> dict[str, int]:
    """Return the 95th percentile of the time to first token by model, in milliseconds."""
    with connection.cursor() as cursor:
        cursor.execute(_TRAFFIC, [now - HOUR])
        return dict(cursor.fetchall())


_TTFT = SharedValue(timedelta(seconds=15), _read_ttft)


def _read_tokens(now: datetime) -> dict[str, list[int]]:
    """Return the tokens of each minute of the last hour by model, the newest minute first. Prompts are included."""
    found: dict[str, list[int]] = {}
    with connection.cursor() as cursor:
        cursor.execute(_TOKENS, [now - HOUR - timedelta(minutes=1), now])
        for model, minute, tokens in cursor.fetchall():
            if 0 <= minute < HOUR_MINUTES:
                found.setdefault(model, [0] * HOUR_MINUTES)[minute] = int(tokens)
    return found


_TOKENS_BY_MINUTE = SharedValue(timedelta(seconds=15), _read_tokens)


def _read_costs(now: datetime) -> dict[str, ModelCost]:
    """Return the costs of the last 24 hours by model."""
    return {cost.model: cost for cost in costs(now - 24 * HOUR, now)}


_COSTS = SharedValue(timedelta(seconds=15), _read_costs)


def deployment_of(ctx: PageContext) -> Deployment:
    """Return the deployment that the page's URL names.

    Raises:
        Http404: it does not exist.
    """
    return ctx.get(lambda: Deployment.objects.filter(name=ctx.arguments["name"]))


def statuses(ctx: PageContext) -> list[DeploymentStatus]:
    """Return the deployments with their states, computed once for all panels."""
    return ctx.once("deployments", _statuses)


def stats(ctx: PageContext) -> dict[str, Any]:
    found = statuses(ctx)
    states = [status.state for status in found]
    not_ready = [
        f"{states.count(state)} {in_sentence(str(LABELS[state][0]))}"
        for state in DeploymentState
        if state != DeploymentState.READY and state in states
    ]
    spent = _COSTS.get(ctx.now)
    known = [cost for cost in spent.values() if cost.cost is not None]
    below = [name for name, cost in spent.items() if _is_below_cost(cost)]
    return {
        "ready_of": _("%(ready)s of %(number)s") % {"ready": states.count(DeploymentState.READY), "number": len(found)},
        "not_ready": ", ".join(not_ready),
        "tokens": sum(map(_rate, _TOKENS_BY_MINUTE.get(ctx.now).values())),
        "running": sum(status.running for status in found),
        "cost": Money(sum(cost.cost or 0 for cost in known)) if known else None,
        "below": below,
        "unpriced": sorted(unpriced_names(status.deployment.name for status in found)),
    }


def deployments(ctx: PageContext) -> dict[str, Any]:
    tokens, spent, ttft = _TOKENS_BY_MINUTE.get(ctx.now), _COSTS.get(ctx.now), _TTFT.get(ctx.now)
    typed, chosen = text_param(ctx, "q").casefold(), ctx.query.get("state", "")
    found = [status for status in statuses(ctx) if _is_shown(status, typed, chosen)]
    unpriced = unpriced_names(status.deployment.name for status in found)
    rows = [
        _row(status, spent.get(status.deployment.name))
        | {
            "rate": _rate(tokens.get(status.deployment.name, [])),
            "trend": _trend(tokens.get(status.deployment.name, [])),
            "ttft_ms": ttft.get(status.deployment.name),
            "is_unpriced": status.deployment.name in unpriced,
        }
        for status in found
    ]
    return {
        "rows": rows,
        "places": common_places(row[name] for row in rows for name in ("cost", "price")),
        "number": len(statuses(ctx)),
        "objective_ms": settings.MILLRACE.ttft_slo_ms,
    }


def filters(ctx: PageContext) -> dict[str, Any]:
    """Return the typed text, the chosen state, and links to the list of each state that a deployment has."""
    states, chosen, url = [status.state for status in statuses(ctx)], ctx.query.get("state", ""), ctx.url(_PAGE)
    links = [Choice(_("All"), changed_url(ctx, url, state=""), not chosen)]
    links += [
        Choice(str(LABELS[state][0]), changed_url(ctx, url, state=state.value), state == chosen)
        for state in DeploymentState
        if state in states or state == chosen
    ]
    return {"typed": text_param(ctx, "q"), "chosen": chosen, "links": links}


def _is_shown(status: DeploymentStatus, typed: str, chosen: str) -> bool:
    row = status.deployment
    return chosen in ("", status.state) and (typed in row.name.casefold() or typed in row.source.casefold())


def upstreams(ctx: PageContext) -> dict[str, Any]:
    """Return the health of each upstream: requests in progress, errors, lack of capacity, and spend of the UTC day."""
    found = [status for status in statuses(ctx) if status.deployment.upstream is not None]
    if not found:
        return {"rows": []}
    with connection.cursor() as cursor:
        cursor.execute(_UPSTREAM_ERRORS, [ctx.now - HOUR, [status.deployment.name for status in found]])
        requests = {name: counts for name, *counts in cursor.fetchall()}
    today = DailyCost.objects.filter(day=ctx.now.date(), model__in=[status.deployment.name for status in found])
    spent = dict(today.order_by().values_list("model").annotate(Sum("cost_femto")))
    ids = {status.deployment.credential_id for status in found if status.deployment.credential_id is not None}
    credentials = UpstreamCredential.objects.all_tenants().filter(pk__in=ids).in_bulk()
    limits = _limits(found)
    rows = []
    for status in found:
        credential = credentials.get(status.deployment.credential_id)
        row = _upstream_row(status, requests.get(status.deployment.name))
        limit = None if credential is None else credential.daily_spend_limit_nano
        row["credential"] = None if credential is None else credential.name
        row["spent"] = Money(int(spent.get(status.deployment.name, 0)))
        row["spend_limit"] = None if limit is None else Money.nano(limit)
        row["rate"] = None if (known := limits.get(status.deployment.name)) is None else known.rate
        row["credential_running"] = 0 if known is None else known.running
        row["max_concurrency"] = None if credential is None else credential.max_concurrency
        rows.append(row)
    return {"rows": rows, "places": common_places(row[name] for row in rows for name in ("spent", "spend_limit"))}


def _limits(found: Sequence[DeploymentStatus]) -> dict[str, UpstreamLimits]:
    upstreams = [(status.deployment.name, status.deployment.upstream) for status in found]
    try:
        return read_upstream_limits((name, upstream) for name, upstream in upstreams if upstream is not None)
    except redis.RedisError:
        return {}


def _upstream_row(status: DeploymentStatus, counts: Sequence[Any] | None) -> dict[str, Any]:
    total, failed, overloaded, code = counts or (0, 0, 0, "")
    beats = [replica.beat for replica in status.replicas]
    if status.state != DeploymentState.READY:
        label, badge = LABELS[status.state]
    elif beats and all(beat.circuit_open for beat in beats):
        label, badge = _("Down"), "bad"
    elif failed * MIN_FAILING_SHARE >= total > 0:
        label, badge = _("Failing"), "bad"
    elif overloaded:
        label, badge = _("Rate limited"), "warn"
    else:
        label, badge = LABELS[status.state]
    row = status.deployment
    return {
        "name": row.name,
        "host": _("Managed") if row.engine == UpstreamEngine.MANAGED else urlsplit(row.source).hostname or row.source,
        "model": row.upstream_model,
        "shares_cache": row.upstream is not None and not preset_of(row.upstream).cache_key,
        "label": label,
        "badge": badge,
        "running": status.running,
        "held_back": sum(beat.held_back for beat in beats),
        "tenants_paused": max((beat.tenants_paused for beat in beats), default=0),
        "most": row.concurrency * max(1, len(status.replicas)),
        "requests": total,
        "failed": failed,
        "overloaded": overloaded,
        "code": code,
    }


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
        "is_upstream": status.deployment.upstream is not None,
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


def _rate(tokens: Sequence[int]) -> int:
    """Return the tokens per second of the last minutes."""
    return sum(tokens[:RATE_MINUTES]) // (60 * RATE_MINUTES)


def _trend(tokens: Sequence[int]) -> list[int]:
    """Return the tokens per second over the last hour, the oldest first. The current minute, which has not ended, is
    not included."""
    starts = range(1, len(tokens) - TREND_MINUTES + 1, TREND_MINUTES)
    return [sum(tokens[start : start + TREND_MINUTES]) // (60 * TREND_MINUTES) for start in reversed(starts)]
