"""The catalog: capabilities, prices, availability and API examples of each model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
from django.conf import settings
from django.utils.translation import gettext as _

from billing.pricing.rate_cards import current_prices
from billing.rates.pricing import Component, Tier
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from inference_worker.checkpoints.encoder_config import ModelTask, model_task
from inference_worker.contract.settings import ModelSpec
from millrace.apps.deployments.fleet_status import FleetStatus, read_fleet_status
from millrace.apps.deployments.served_deployments import served_specs
from tenants.models import RoutingPolicy
from tenants.routing_policies import policy

_PRICED = (
    (Component.UNCACHED, _lazy("Input")),
    (Component.CACHE_READ, _lazy("Cached input")),
    (Component.OUTPUT, _lazy("Output")),
)
_CAPABILITIES: Mapping[ModelTask, tuple[str, ...]] = {
    "generate": (
        _lazy("Chat"),
        _lazy("Responses"),
        _lazy("Messages"),
        _lazy("Streaming"),
        _lazy("Tools"),
        _lazy("Structured outputs"),
        _lazy("Prompt cache"),
        _lazy("Batches"),
    ),
    "embed": (_lazy("Embeddings"), _lazy("Batches")),
    "rerank": (_lazy("Rerank"), _lazy("Score"), _lazy("Batches")),
}
_BODIES: Mapping[ModelTask, tuple[str, str]] = {  # path and body of an example
    "generate": ("chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'),
    "embed": ("embeddings", '"input": "Hello!"'),
    "rerank": ("rerank", '"query": "Hello!", "documents": ["Good morning.", "Goodbye."]'),
}


@dataclass(frozen=True)
class Snippets:
    """API examples for a model."""

    base_url: str
    model: str
    task: ModelTask

    @property
    def curl(self) -> str:
        path, body = _BODIES[self.task]
        return f"""curl {self.base_url}/{path} \\
  -H "Authorization: Bearer $MILLRACE_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{self.model}", {body}}}'"""

    @property
    def python(self) -> str:
        imports = "from openai import OpenAI"
        if self.task == "embed":
            ask = f"""found = client.embeddings.create(model="{self.model}", input="Hello!")
print(found.data[0].embedding)"""
        elif self.task == "rerank":
            imports = "import httpx2\nfrom openai import OpenAI"
            body = f'{{"model": "{self.model}", {_BODIES["rerank"][1]}}}'
            ask = f"""found = client.post("/rerank", cast_to=httpx2.Response, body={body})
print(found.json()["results"])"""
        else:
            ask = f"""answer = client.chat.completions.create(
    model="{self.model}",
    messages=[{{"role": "user", "content": "Hello!"}}],
)
print(answer.choices[0].message.content)"""
        return f"""import os

{imports}

client = OpenAI(base_url="{self.base_url}", api_key=os.environ["MILLRACE_API_KEY"])
{ask}"""


def models(ctx: PageContext) -> list[dict[str, Any]]:
    """Return all models that the platform serves. Call inside `ctx.scope()`."""
    try:
        board = read_fleet_status()
    except redis.RedisError:
        board = None  # the catalog is useful without it
    prices, aliases = _prices(ctx), _aliases(ctx)
    return [
        _model(spec, board) | {"prices": prices.get(spec.name, ()), "aliases": aliases.get(spec.name, ())}
        for spec in served_specs()
    ]


def snippets(ctx: PageContext, name: str) -> Snippets | None:
    """Return API examples for the model; None if it does not exist."""
    platform = settings.MILLRACE
    spec = next((spec for spec in served_specs() if spec.name == name), None)
    return None if spec is None else Snippets(f"{platform.base_url}/v1", name, model_task(spec.source))


def _model(spec: ModelSpec, board: FleetStatus | None) -> dict[str, Any]:
    beats = [] if board is None else [status.beat for status in board.replicas if status.beat.model == spec.name]
    lengths = [beat.machine.max_model_len for beat in beats if beat.machine is not None]
    task = model_task(spec.source)
    state, badge = (_("Unknown"), "") if board is None else (_("Ready"), "good")
    if board is not None and not board.count_ready(spec.name):
        state, badge = (_("Starting"), "info") if beats else (_("Not running"), "warn")
    return {
        "name": spec.name,
        "task": task,
        "context": min(lengths) if lengths else spec.max_model_len,
        "state": state,
        "badge": badge,
        "can": _CAPABILITIES[task],
    }


def _prices(ctx: PageContext) -> Mapping[str, list[tuple[str, Money]]]:
    """Return USD per 1M tokens by model, for the shortest prompts at the start of the day."""
    found: dict[str, dict[Component, int]] = defaultdict(dict)
    rows = [row for row in current_prices(ctx.tenant.pk, ctx.now) if row.tier == Tier.STANDARD]
    for row in sorted(rows, key=lambda row: (row.from_tokens, row.from_minute)):
        found[row.model].setdefault(Component(row.component), row.nano_per_million)
    return {
        model: [(label, Money.nano(rates[part])) for part, label in _PRICED if part in rates]
        for model, rates in found.items()
    }


def _aliases(ctx: PageContext) -> Mapping[str, list[RoutingPolicy]]:
    """Return the tenant's active aliases by model."""
    found: dict[str, list[RoutingPolicy]] = defaultdict(list)
    for row in RoutingPolicy.objects.for_tenant(ctx.tenant).filter(active=True).order_by("name"):
        try:
            named = policy.parse(row.body).models
        except ValueError:
            continue  # written by a release with other rules
        for model in named:
            found[model].append(row)
    return found
