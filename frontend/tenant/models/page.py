"""The catalog as a tenant sees it: what each model can, what it costs, whether it is there, how to ask it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

import redis

from billing.pricing.price_book import current_prices
from billing.pricing.pricing import Component, Tier
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.tenant.playground.page import EMBEDS
from inference_worker.contract.settings import ModelSpec
from millrace.apps.operations.fleet_status import FleetStatus, read_fleet_status
from millrace.conf.environment import platform_settings
from tenants.models import RoutingPolicy
from tenants.permissions import Permission
from tenants.routing_policies import policy

_PRICED = ((Component.UNCACHED, "Input"), (Component.CACHE_READ, "Cached input"), (Component.OUTPUT, "Output"))
ANSWERS = ("Chat", "Responses", "Messages", "Streaming", "Tools", "Structured outputs", "Prompt cache", "Batches")
VECTORS = ("Embeddings", "Batches")


@dataclass(frozen=True)
class ModelPagePrice:
    label: str
    amount: Money


@dataclass(frozen=True)
class Alias:
    """A name of the tenant's own that may lead to the model."""

    name: str
    url: str


@dataclass(frozen=True)
class ModelPageEntry:
    name: str
    context: int | None  # tokens; None: no replica has said
    state: str
    badge: str
    can: tuple[str, ...]
    prices: tuple[ModelPagePrice, ...]  # USD a million tokens, of the shortest prompts at the start of the day
    aliases: tuple[Alias, ...]
    one_url: str
    playground_url: str  # empty: it answers nothing, or this person may not


@dataclass(frozen=True)
class Snippets:
    """How to ask a model."""

    base_url: str
    model: str
    embeds: bool

    @property
    def curl(self) -> str:
        path, body = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
        if self.embeds:
            path, body = "embeddings", '"input": "Hello!"'
        return f"""curl {self.base_url}/{path} \\
  -H "Authorization: Bearer $MILLRACE_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{self.model}", {body}}}'"""

    @property
    def python(self) -> str:
        if self.embeds:
            ask = f"""found = client.embeddings.create(model="{self.model}", input="Hello!")
print(found.data[0].embedding)"""
        else:
            ask = f"""answer = client.chat.completions.create(
    model="{self.model}",
    messages=[{{"role": "user", "content": "Hello!"}}],
)
print(answer.choices[0].message.content)"""
        return f"""import os

from openai import OpenAI

client = OpenAI(base_url="{self.base_url}", api_key=os.environ["MILLRACE_API_KEY"])
{ask}"""


def models(visit: PageContext) -> tuple[ModelPageEntry, ...]:
    """All models the platform serves. In the visit's scope."""
    try:
        board = read_fleet_status()
    except redis.RedisError:
        board = None  # the catalog is worth reading nevertheless
    prices, aliases = _prices(visit), _aliases(visit)
    return tuple(_model(visit, spec, board, prices, aliases) for spec in platform_settings().models)


def snippets(visit: PageContext, name: str) -> Snippets | None:
    """How to ask the model; None: there is no such."""
    settings = platform_settings()
    spec = next((spec for spec in settings.models if spec.name == name), None)
    return None if spec is None else Snippets(f"{settings.base_url}/v1", name, spec.source == EMBEDS)


def _model(
    visit: PageContext,
    spec: ModelSpec,
    board: FleetStatus | None,
    prices: Mapping[str, tuple[ModelPagePrice, ...]],
    aliases: Mapping[str, list[Alias]],
) -> ModelPageEntry:
    mine = [] if board is None else [one.beat for one in board.replicas if one.beat.model == spec.name]
    lengths = [beat.machine.max_model_len for beat in mine if beat.machine is not None]
    embeds = spec.source == EMBEDS
    state, badge = ("Unknown", "") if board is None else ("Ready", "good")
    if board is not None and not board.ready(spec.name):
        state, badge = ("Starting", "info") if mine else ("Not running", "warn")
    play = visit.link("playground") if visit.may(Permission.KEYS_WRITE) and not embeds else ""
    return ModelPageEntry(
        name=spec.name,
        context=min(lengths) if lengths else spec.max_model_len,
        state=state,
        badge=badge,
        can=VECTORS if embeds else ANSWERS,
        prices=prices.get(spec.name, ()),
        aliases=tuple(aliases.get(spec.name, ())),
        one_url=visit.url("models-detail", spec.name),
        playground_url=f"{play}?{urlencode({'model': spec.name})}" if play else "",
    )


def _prices(visit: PageContext) -> Mapping[str, tuple[ModelPagePrice, ...]]:
    found: dict[str, dict[Component, int]] = defaultdict(dict)
    rows = [row for row in current_prices(visit.tenant.pk, visit.now) if row.tier == Tier.STANDARD]
    for row in sorted(rows, key=lambda row: (row.from_tokens, row.from_minute)):
        found[row.model].setdefault(Component(row.component), row.nano_per_million)
    return {
        model: tuple(ModelPagePrice(label, Money.nano(rates[part])) for part, label in _PRICED if part in rates)
        for model, rates in found.items()
    }


def _aliases(visit: PageContext) -> Mapping[str, list[Alias]]:
    """Return the tenant's own active names, by the models they may lead to."""
    found: dict[str, list[Alias]] = defaultdict(list)
    for row in RoutingPolicy.objects.for_tenant(visit.tenant).filter(active=True).order_by("name"):
        try:
            named = policy.parse(row.body).models
        except ValueError:
            continue  # of a release that knew other rules
        url = visit.link("routing-detail", row.pk) if visit.may(Permission.POLICIES_READ) else ""
        for model in named:
            found[model].append(Alias(row.name, url))
    return found
