"""The playground: keys, models, prices, and a request from the log to repeat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.utils.translation import gettext as _

from billing.pricing.rate_cards import current_prices
from billing.rates.price_book import NewPrice
from billing.rates.pricing import Tier
from frontend.core.backend_messages import translate_message
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.tenant.overview.quick_start import CodeExample
from millrace.apps.deployments.model_obstacles import task_of
from millrace.apps.deployments.served_deployments import served_specs
from millrace.apps.request_log.selectors import stored_content
from millrace.apps.request_log.stored_prompts import decode_body
from tenants.models import ApiKey, RoutingPolicy
from tenants.permissions import Permission
from tenants.routing_policies import policy
from tenants.routing_policies.target_checks import TargetChecks

MAX_MODELS = 4
MAX_KEYS = 500  # in the list; another one can be selected by the link on its page
PRESETS = (
    (_lazy("Precise"), "0", "1"),
    (_lazy("Balanced"), "0.7", "1"),
    (_lazy("Creative"), "1", "0.95"),
)  # label, temperature, top_p
# The code is written by the script.
EXAMPLES = tuple(
    CodeExample(name, language, "")
    for name, language in (("python", "Python"), ("node", "Node"), ("curl", "curl"), ("anthropic", "Anthropic SDK"))
)


@dataclass(frozen=True)
class PlaygroundModel:
    """A name that can be requested."""

    name: str
    detail: str
    problem: str  # problem of one of its targets; empty: all can serve requests
    is_usable: bool


@dataclass(frozen=True)
class ReplayedRequest:
    """Initial values of the form: empty, or those of a request from the log."""

    request_id: str = ""
    known: bool = False  # true if its prompt is stored
    system: str = ""
    prompt: str = ""
    temperature: str = ""
    max_tokens: str = ""
    top_p: str = ""
    tools: str = ""
    schema: str = ""


def playground(ctx: PageContext) -> dict[str, Any]:
    """Return the content of the page. Call inside `ctx.scope()`."""
    models = _models(ctx)
    selected = ctx.query.get("model", "").split(",")
    usable = [model.name for model in models if model.is_usable]
    chosen = [name for name in usable if name in selected] or [model.name for model in models if not model.problem][:1]
    prices = current_prices(ctx.tenant.pk, ctx.now)
    keys = list(_usable(ctx).order_by("name", "pk")[: MAX_KEYS + 1])
    named = usable_key(ctx, ctx.query.get("key", ""))
    return {
        "keys": keys[:MAX_KEYS] + ([] if named is None or named in keys[:MAX_KEYS] else [named]),
        "max_keys": MAX_KEYS if len(keys) > MAX_KEYS else 0,
        "key": ctx.query.get("key", ""),
        "models": [(model, model.name in chosen[:MAX_MODELS]) for model in models],
        "again": _replayed_request(ctx),
        "data": {  # for the script
            "base_url": settings.MILLRACE.base_url,
            "token_url": ctx.url("playground-token"),
            "budgets": ctx.url("budgets"),
            "request": ctx.url("requests-detail", "-id-"),
            "served": {name: targets[0] for name, targets in _policies(ctx).items()},
            "symbol": Money(0).symbol,
            "prices": _rates(price for price in prices if price.tier == Tier.STANDARD),
        },
        "most": MAX_MODELS,
        "presets": PRESETS,
        "examples": EXAMPLES,
    }


def usable_key(ctx: PageContext, pk: str) -> ApiKey | None:
    """Return the tenant's key with this ID if it may run inference."""
    rows = _usable(ctx).filter(pk=int(pk)) if pk.isdecimal() and len(pk) < 19 else None
    return None if rows is None else rows.first()


def _usable(ctx: PageContext) -> Any:
    live = ApiKey.objects.for_tenant(ctx.tenant).filter(revoked_at=None, scopes__contains=["inference"])
    return live.filter(Q(expires_at=None) | Q(expires_at__gt=datetime.now(UTC)))


def _models(ctx: PageContext) -> list[PlaygroundModel]:
    """Return the names that can be requested, usable ones first. An alias is usable if one of its targets is."""
    policies = _policies(ctx)
    served = [spec.name for spec in served_specs(wanted_loaded=True) if task_of(spec) == "generate"]
    targets = {name: (name,) for name in served if name not in policies} | policies
    checks = TargetChecks(ctx.tenant.pk)
    checks.load(model for models in targets.values() for model in models)
    found = []
    for name, models in targets.items():
        problems = [each for each in checks.of_models((name, model) for model in models) if each.is_blocking]
        detail = _("Alias for %(targets)s") % {"targets": ", ".join(models)} if name in policies else ""
        problem = translate_message(problems[0].message()) if problems else ""
        found.append(PlaygroundModel(name, detail, problem, is_usable=len(problems) < len(models)))
    return sorted(found, key=lambda model: not model.is_usable)


def _policies(ctx: PageContext) -> dict[str, tuple[str, ...]]:
    rows = RoutingPolicy.objects.for_tenant(ctx.tenant).filter(active=True).order_by("name")
    return {row.name: policy.parse(row.body).models for row in rows}


def _rates(prices: Iterable[NewPrice]) -> dict[str, list[list[Any]]]:
    """Return the prices of each model for the script: component, nano-units per 1M tokens as text, and bounds of
    tokens, minutes and weekdays, with the time zone.
    """
    found: dict[str, list[list[Any]]] = {}
    for price in prices:
        row = [price.component.value, str(price.nano_per_million), *price.ranges]
        found.setdefault(price.model, []).append(row)
    return found


def _replayed_request(ctx: PageContext) -> ReplayedRequest:
    """Return the request in the query string, if the tenant stores prompts."""
    request_id = ctx.query.get("request", "")
    if not request_id or not ctx.may(Permission.USAGE_READ):
        return ReplayedRequest()
    content = stored_content(ctx.tenant.pk, request_id[:64])
    body = {} if content is None else decode_body(content.body) or {}
    texts = {"system": "", "user": ""}
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(message.get("content"), str):
            role = "system" if message.get("role") in ("system", "developer") else str(message.get("role"))
            texts[role] = message["content"]
    response_format = body.get("response_format")
    schema = response_format.get("json_schema") if isinstance(response_format, dict) else None
    return ReplayedRequest(
        request_id,
        bool(texts["user"]),
        texts["system"],
        texts["user"],
        temperature=_option(body, "temperature"),
        max_tokens=_option(body, "max_tokens"),
        top_p=_option(body, "top_p"),
        tools=_json_text(body.get("tools")),
        schema=_json_text(schema.get("schema") if isinstance(schema, dict) else None),
    )


def _option(body: dict[str, Any], name: str) -> str:
    return "" if body.get(name) is None else str(body[name])


def _json_text(value: Any) -> str:
    try:
        return json.dumps(value, indent=2, ensure_ascii=False) if value else ""
    except RecursionError:
        return ""
