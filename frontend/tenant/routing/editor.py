"""The data of the rule builder: what a policy can name, and the marks that a check leaves at its fields."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from django.db.models import Value
from django.utils.translation import gettext as _

from billing.pricing.rate_cards import current_prices
from billing.rates.pricing import Component, Tier
from frontend.core.backend_messages import translate_message
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.tenant.routing import positions
from frontend.tenant.routing.checking import CheckResult
from frontend.tenant.routing.positions import PolicyError
from inference_worker.contract.settings import ModelSpec
from millrace.apps.deployments.model_obstacles import choose_example
from millrace.apps.deployments.served_deployments import served_specs
from tenants.models import ApiKey, Project
from tenants.routing_policies.policy import Rule
from tenants.routing_policies.target_checks import ModelObstacle, TargetChecks

MAX_CHOICES = 200  # API keys and projects
MAX_MODELS = 500
_NUMBER_EXPECTED = "Expected `int"  # the start of the parser's message, which the tab JSON shows
STATES = {  # label and color of a model's state
    None: (_lazy("Ready"), "good"),
    ModelObstacle.NOT_READY: (_lazy("Not ready"), "warn"),
    ModelObstacle.DRAINED: (_lazy("Drained"), "warn"),
    ModelObstacle.UNLOADED: (_lazy("Unloaded"), "bad"),
    ModelObstacle.UNPRICED: (_lazy("No price"), "bad"),
    ModelObstacle.UNKNOWN: (_lazy("No deployment"), "bad"),
}
STRATEGY_NAMES = {
    "weighted": _lazy("Weighted"),
    "ordered": _lazy("In order"),
    "cheapest": _lazy("Cheapest that fits"),
    "lowest_latency": _lazy("Lowest latency"),
    "least_busy": _lazy("Least busy"),
}
ANSWER_CHECKS = {
    "schema": _lazy("Not valid under the schema"),
    "tool_arguments": _lazy("Invalid tool arguments"),
    "pattern": _lazy("Pattern does not match"),
    "empty": _lazy("Empty answer"),
}
FALLBACKS = {
    "error": _lazy("Worker error"),
    "overload": _lazy("Overload"),
    "rate_limit": _lazy("Rate limit"),
    "context": _lazy("Context overflow"),
    "timeout": _lazy("No token in time"),
}


def builder_data(ctx: PageContext, targets: TargetChecks, text: str) -> dict[str, Any]:
    """Return the models, API keys and projects that the builder of a policy offers. Call inside `ctx.scope()`.

    The states of the policy's models are read together with those of the offered ones.
    """
    keys, projects = _named_rows(ctx)
    unknown, color = STATES[ModelObstacle.UNKNOWN]
    served = served_specs()[:MAX_MODELS]
    named = [target.model for rule in _rules_of(text) for target in rule.targets]
    obstacles = targets.obstacles_of([*(spec.name for spec in served), *named])
    return {
        "models": _models(ctx, served, obstacles),
        "example": choose_example(served, obstacles),
        "unknown": {"state": str(unknown), "color": color},
        "keys": keys,
        "projects": projects,
        "zone": str(ctx.zone),
    }


def check_marks(ctx: PageContext, checked: CheckResult, text: str, name_error: str = "") -> dict[str, Any]:
    """Return what the builder shows at the fields of a policy: errors, requests of each rule, and changes."""
    found: dict[str, Any] = {"errors": [], "requests": [], "changes": []}
    if name_error:
        found["errors"].append({"place": "name", "message": name_error})
    if checked.error is not None:
        is_number = checked.error.message.startswith(_NUMBER_EXPECTED)
        message = _("Enter a whole number.") if is_number else checked.error.message
        found["errors"].append({"place": checked.error.place, "message": message})
        return found
    found["errors"] += [
        {"place": problem.place.removeprefix("$."), "message": translate_message(problem.message())}
        for problem in checked.places
        if problem.is_blocking
    ]
    rules = _rules_of(text)
    if checked.trial is not None and checked.trial.requests:
        found["requests"] = [checked.trial.rules.get(index, 0) for index in range(len(rules))]
    if checked.active is not None:
        active = _rules_of(json.dumps(checked.active.body))
        found["changes"] = [_change(rule, index, active) for index, rule in enumerate(rules)]
    return found


def _models(
    ctx: PageContext, served: Iterable[ModelSpec], obstacles: Mapping[str, ModelObstacle]
) -> list[dict[str, str]]:
    """Return the name, the price and the state of each served model."""
    prices, found = _prices(ctx), []
    for spec in served:
        state, color = STATES[obstacles.get(spec.name)]
        found.append({"name": spec.name, "price": prices.get(spec.name, ""), "state": str(state), "color": color})
    return found


def _prices(ctx: PageContext) -> Mapping[str, str]:
    """Return the prices of input and output tokens by model, for the shortest prompts at the start of the day."""
    rates: dict[str, dict[str, int]] = defaultdict(dict)
    rows = [row for row in current_prices(ctx.tenant.pk, ctx.now) if row.tier == Tier.STANDARD]
    for row in sorted(rows, key=lambda row: (row.from_tokens, row.from_minute)):
        rates[row.model].setdefault(row.component, row.nano_per_million)
    parts = (Component.UNCACHED, Component.OUTPUT)
    return {
        model: _("%(prices)s per 1M")
        % {"prices": " / ".join(Money.nano(known[part]).text for part in parts if part in known)}
        for model, known in rates.items()
        if any(part in known for part in parts)
    }


def _named_rows(ctx: PageContext) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the IDs and names of the tenant's API keys and projects."""
    keys = ApiKey.objects.for_tenant(ctx.tenant).filter(revoked_at=None).annotate(kind=Value("key"))
    projects = Project.objects.for_tenant(ctx.tenant).annotate(kind=Value("project"))
    columns = ("kind", "pk", "name")
    rows = keys.values_list(*columns).union(projects.values_list(*columns)).order_by("kind", "name")[:MAX_CHOICES]
    found: dict[str, list[dict[str, Any]]] = {"key": [], "project": []}
    for kind, pk, name in rows:
        found[kind].append({"id": pk, "name": name})
    return found["key"], found["project"]


def _rules_of(text: str) -> tuple[Rule, ...]:
    found = positions.read(text)
    return () if isinstance(found, PolicyError) else found[1].rules


def _change(rule: Rule, index: int, active: tuple[Rule, ...]) -> str:
    """Return how a rule differs from the active version."""
    if rule in active:
        return ""
    names = {other.name for other in active if other.name}
    is_known = rule.name in names if rule.name else index < len(active)
    return _("Changed") if is_known else _("Added")
