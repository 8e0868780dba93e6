"""What the playground offers: keys, models, prices; and what a request from the log asked, to ask it again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db.models import Q

from billing.pricing.price_book import NewPrice, current_prices
from billing.pricing.pricing import Tier
from frontend.core.page_context import PageContext
from millrace.apps.request_log.selectors import stored_content
from millrace.conf.environment import platform_settings
from tenants.models import ApiKey, RoutingPolicy
from tenants.permissions import Permission
from tenants.routing_policies import policy

EMBEDS = "embedded:minilm"  # the source of models that answer no chat
MOST_AT_ONCE = 4  # models side by side


@dataclass(frozen=True)
class KeyChoice:
    """A key that may be used. `models`: names it is held to, or none."""

    pk: int
    name: str
    prefix: str
    models: str  # with spaces between; empty: all
    chosen: bool


@dataclass(frozen=True)
class ModelChoice:
    name: str
    detail: str
    chosen: bool


@dataclass(frozen=True)
class Again:
    """What stands in the fields: nothing, or what a request of the log asked."""

    request_id: str = ""
    known: bool = False  # its prompt was kept
    system: str = ""
    prompt: str = ""
    temperature: str = "0.7"  # small models ramble at 1, the API's default
    max_tokens: str = ""


@dataclass(frozen=True)
class Playground:
    keys: tuple[KeyChoice, ...]
    models: tuple[ModelChoice, ...]
    again: Again
    data: dict[str, Any]  # for the script
    new_key_url: str  # empty while there is no such page
    most: int = MOST_AT_ONCE


def playground(visit: PageContext) -> Playground:
    """In the visit's scope."""
    again = _again(visit)
    names = _models(visit)
    wanted = visit.query.get("model", "").split(",")
    chosen = [name for name in names if name in wanted] or list(names)[:1]
    prices = current_prices(visit.tenant.pk, visit.now)
    return Playground(
        tuple(_keys(visit)),
        tuple(ModelChoice(name, detail, name in chosen[:MOST_AT_ONCE]) for name, detail in names.items()),
        again,
        {
            "base_url": f"{platform_settings().base_url}/v1",
            "ticket": visit.url("playground-ticket"),
            "budgets": visit.link("budgets"),
            "request": visit.link("requests-detail", "-id-"),
            "served": {name: targets[0] for name, targets in _policies(visit).items()},
            "prices": _rates(price for price in prices if price.tier == Tier.STANDARD),
        },
        visit.link("keys-new"),
    )


def usable_key(visit: PageContext, pk: str) -> ApiKey | None:
    """Return the tenant's key with this id, if it may ask models."""
    rows = _usable(visit).filter(pk=int(pk)) if pk.isdecimal() and len(pk) < 19 else None
    return None if rows is None else rows.first()


def _usable(visit: PageContext) -> Any:
    live = ApiKey.objects.for_tenant(visit.tenant).filter(revoked_at=None, scopes__contains=["inference"])
    return live.filter(Q(expires_at=None) | Q(expires_at__gt=datetime.now(UTC)))


def _keys(visit: PageContext) -> Iterable[KeyChoice]:
    wanted = visit.query.get("key", "")
    for key in _usable(visit).order_by("name", "pk"):
        held = " ".join(key.allowed_models or ())
        yield KeyChoice(key.pk, key.name, f"{key.prefix}…", held, str(key.pk) == wanted)


def _models(visit: PageContext) -> dict[str, str]:
    """Names that may be asked for, and what they are."""
    own = {name: f"Alias for {', '.join(targets)}" for name, targets in _policies(visit).items()}
    served = [spec.name for spec in platform_settings().models if spec.source != EMBEDS]
    return {name: "" for name in served if name not in own} | own


def _policies(visit: PageContext) -> dict[str, tuple[str, ...]]:
    rows = RoutingPolicy.objects.for_tenant(visit.tenant).filter(active=True).order_by("name")
    return {row.name: policy.parse(row.body).models for row in rows}


def _rates(prices: Iterable[NewPrice]) -> dict[str, list[list[Any]]]:
    """Each model's prices, as the script reads them: component, nano-USD a million as text, tokens and minutes from and
    until."""
    found: dict[str, list[list[Any]]] = {}
    for price in prices:
        ranges = [price.from_tokens, price.until_tokens, price.from_minute, price.until_minute]
        found.setdefault(price.model, []).append([price.component.value, str(price.nano_per_million), *ranges])
    return found


def _again(visit: PageContext) -> Again:
    """Return what the request in the address asked, if the tenant has prompts kept."""
    request_id = visit.query.get("request", "")
    if not request_id or not visit.may(Permission.USAGE_READ):
        return Again()
    kept = stored_content(visit.tenant.pk, request_id[:64].replace("\0", ""))
    body: dict[str, Any] = {}
    if kept is not None and not kept.truncated:
        try:
            body = json.loads(kept.body)
        except ValueError:
            body = {}
    said = {"system": "", "user": ""}
    for message in body.get("messages") or ():
        if isinstance(message, dict) and isinstance(message.get("content"), str):
            role = "system" if message.get("role") in ("system", "developer") else str(message.get("role"))
            said[role] = message["content"]
    asked = [str(body.get(name) or "") for name in ("temperature", "max_tokens")]
    return Again(request_id, bool(said["user"]), said["system"], said["user"], *asked)
