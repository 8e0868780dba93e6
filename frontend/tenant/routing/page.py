"""Routing policies: aliases, rules as text, versions and differences."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet

from frontend.core.page_context import PageContext
from frontend.tenant.routing.positions import pretty
from tenants.models import ApiKey, RoutingPolicy
from tenants.routing_policies import policy
from tenants.routing_policies.policy import Policy, Rule, When

MAX_VERSIONS = 100  # aliases, or versions of one alias
FALLBACKS = {
    "error": "worker error",
    "overload": "overload",
    "context": "context overflow",
}
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True)
class RoutingPanel:
    """A policy as text."""

    rules: tuple[dict[str, Any], ...]
    fallbacks: tuple[str, ...]


DiffLine = tuple[str, str]  # "+", "-" or a space, and the text


def versions(ctx: PageContext) -> QuerySet[RoutingPolicy]:
    """Return all versions of all aliases. Call inside `ctx.scope()`."""
    found: QuerySet[RoutingPolicy] = RoutingPolicy.objects.for_tenant(ctx.tenant).select_related("created_by")
    return found


def names(ctx: PageContext) -> list[tuple[RoutingPolicy, int, tuple[str, ...]]]:
    """Return each alias with its active version, or its last one if unpublished, its number of rules and its models.

    Call inside `ctx.scope()`.
    """
    rows = versions(ctx).order_by("name", "-active", "-version").distinct("name")[:MAX_VERSIONS]
    return [(row, *_size(row)) for row in rows]


def detail(ctx: PageContext, row: RoutingPolicy) -> dict[str, Any]:
    """Return a version and its changes since the active or the previous version. Call inside `ctx.scope()`."""
    rows = list(versions(ctx).filter(name=row.name).order_by("-version")[:MAX_VERSIONS])
    against = next((policy for policy in rows if policy.active), None)
    if row.active or against is None:
        against = next((policy for policy in rows if policy.version < row.version), None)
    return {
        "version": row,
        "shown": _panel_of(ctx, row),  # None if a release with other rules wrote it
        "text": pretty(row.body),
        "against": against,
        "diff": diff(pretty(against.body), pretty(row.body)) if against else (),
        "versions": rows,
    }


def in_words(ctx: PageContext, of: Policy) -> RoutingPanel:
    """Return the policy as text. Call inside `ctx.scope()`."""
    ids = {key for rule in of.rules for key in rule.when.keys or ()}
    keys = dict(ApiKey.objects.for_tenant(ctx.tenant).filter(pk__in=ids).values_list("pk", "name")) if ids else {}
    return RoutingPanel(
        rules=tuple(_rule(number, rule, keys) for number, rule in enumerate(of.rules, 1)),
        fallbacks=tuple(FALLBACKS[condition] for condition in of.fallback_on),
    )


def _panel_of(ctx: PageContext, row: RoutingPolicy) -> RoutingPanel | None:
    try:
        return in_words(ctx, policy.parse(row.body))
    except ValueError:
        return None


def _size(row: RoutingPolicy) -> tuple[int, tuple[str, ...]]:
    try:
        found = policy.parse(row.body)
    except ValueError:
        return 0, ()
    return len(found.rules), found.models


def _rule(number: int, rule: Rule, keys: Mapping[int, str]) -> dict[str, Any]:
    """Return a rule as text. Without conditions it always matches. Targets without a weight stand by."""
    total = sum(target.weight for target in rule.targets)
    drawn = [(target, f"{target.weight * 1000 // total / 10:g}%") for target in rule.targets if target.weight]
    return {
        "number": number,
        "conditions": list(_conditions(rule.when, keys)),
        "drawn": drawn,
        "total": total,
        "standing_by": [target.model for target in rule.targets if not target.weight],
    }


def _conditions(when: When, keys: Mapping[int, str]) -> Iterator[str]:
    if (tokens := when.prompt_tokens) is not None:
        if tokens.at_most is None:
            yield f"prompt of {tokens.at_least:,} tokens or more"
        elif not tokens.at_least:
            yield f"prompt of at most {tokens.at_most:,} tokens"
        else:
            yield f"prompt of {tokens.at_least:,} to {tokens.at_most:,} tokens"
    if when.tools is not None:
        yield "with tools" if when.tools else "without tools"
    if when.schema is not None:
        yield "structured output" if when.schema else "no structured output"
    if when.keys is not None:
        yield f"by key {_listed(keys.get(key, f'no. {key}') for key in when.keys)}"
    if (hours := when.hours) is not None:
        days = "" if len(hours.days) == len(DAYS) else f" on {_listed(day.capitalize() for day in hours.days)}"
        yield f"{hours.start} to {hours.end} {hours.zone}{days}"


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def diff(old: str, new: str) -> list[DiffLine]:
    """Return all lines with removed and added ones; empty if the texts are equal."""
    if old == new:
        return []
    lines = difflib.ndiff(old.splitlines(), new.splitlines())
    return [(line[0], line[2:]) for line in lines if line[0] != "?"]
