"""Screens of experiments: a running one with results, one that harm has stopped, a draft, and the form."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.frontend.console import Screen, World, register

ARMS = [
    {"name": "current", "share": 40, "model": "smollm2-135m"},
    {"name": "8 bits", "share": 40, "model": "smollm2-135m-int8"},
]


def prepare(world: World) -> None:
    from tenants import actions  # here: Django is not set up on import

    for state in ("populated", "over"):
        tenant, now = world.tenants[state], datetime.now(UTC)
        drafted = _experiment(tenant, "Unstarted", "other")
        harmed = actions.do_start_experiment(_experiment(tenant, "Harm", "slow"))
        _count(harmed, now, 1.8)
        actions.do_stop_experiment(harmed, "harm", "ttft")
        running = actions.do_start_experiment(_experiment(tenant, "8 bits for the chat of support", "mine"))
        _count(running, now, 0.9)
        for name, row in (("experiment", running), ("experiment_draft", drafted), ("harm", harmed)):
            world.rows[f"{state}.{name}"] = row.pk


def _experiment(tenant: Any, name: str, model: str) -> Any:
    from tenants import actions

    guardrails = {"ttft": 0.1, "success": 0.02}
    return actions.do_create_experiment(
        tenant, name=name, model=model, arms=ARMS, primary_metric="cost", guardrails=guardrails
    )


def _count(experiment: Any, now: datetime, ttft_factor: float) -> None:
    """Write the sums of two arms as counted requests of nine days."""
    from millrace.apps.experiments.models import ArmTotal
    from millrace.apps.experiments.statistics import Moments
    from tenants.isolation.scopes import tenant_scope
    from tenants.models import Experiment

    rng = random.Random(experiment.model)
    with tenant_scope(experiment.tenant_id):
        rows = Experiment.objects.for_tenant(experiment.tenant_id).filter(pk=experiment.pk)
        rows.update(started_at=now - timedelta(days=9))
        for arm, (cost, ttft) in enumerate(((9.0, 1.0), (5.6, ttft_factor))):
            sums = {name: Moments() for name in ("requests", "cost", "ttft", "itl", "success", "cache_hit")}
            for _ in range(600):
                values = {
                    "requests": (1, 1),
                    "cost": (1, round(cost * 10**11 * rng.lognormvariate(0, 0.8))),
                    "ttft": (1, round(1e6 * (5.7 + rng.gauss(0, 0.5))) + round(1e6 * (ttft - 1))),
                    "itl": (1, round(1e6 * (9.9 + rng.gauss(0, 0.2)))),
                    "success": (1, int(rng.random() < 0.94)),
                    "cache_hit": (1000, rng.randrange(1000)),
                }
                sums = {name: sums[name].replace_pair((0, 0), pair) for name, pair in values.items()}
            moments = {name: found.as_list() for name, found in sums.items()}
            ArmTotal.objects.create(
                tenant_id=experiment.tenant_id, experiment_id=experiment.pk, arm=arm, requests=600, moments=moments
            )


def _newest(tenant: Any) -> int:
    from tenants import actions
    from tenants.models import Experiment

    row = Experiment.objects.for_tenant(tenant).order_by("-pk").first()
    if row is None:
        row = actions.do_start_experiment(_experiment(tenant, "8 bits for chat", "assistant"))
        _count(row, datetime.now(UTC), 0.9)
    return int(row.pk)


ONE = ("populated",)
register(
    Screen("experiments-detail", "/t/{slug}/experiments/{experiment}", queries=25, states=("populated", "over")),
    Screen("experiments-harm", "/t/{slug}/experiments/{harm}", queries=20, states=ONE),
    Screen("experiments-draft", "/t/{slug}/experiments/{experiment_draft}", queries=25, states=ONE),
    Screen("experiments-new", "/t/{slug}/experiments/new", queries=12, states=("populated", "empty")),
    Screen("experiments-stop", "/t/{slug}/experiments/{experiment}/stop", 12, states=ONE),
    Screen("experiments", "/t/{slug}/experiments/", queries=12),
    prepare=prepare,
    theirs={
        "experiment": lambda world: world.rows["populated.experiment"],
        "harm": lambda world: world.rows["populated.harm"],
        "experiment_draft": lambda world: world.rows["populated.experiment_draft"],
    },
    demo={"experiment": _newest, "harm": _newest, "experiment_draft": _newest},
)
