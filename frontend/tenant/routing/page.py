"""View models of routing policies: aliases, rules as text, versions and differences."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet

from frontend.core.page_context import PageContext
from frontend.tenant.routing.positions import pretty
from tenants.models import ApiKey, RoutingPolicy
from tenants.permissions import Permission
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
class RoutingTarget:
    model: str
    weight: int
    of: int  # sum of the rule's weights
    share: str  # empty for a standby target


@dataclass(frozen=True)
class RoutingRule:
    number: int
    conditions: tuple[str, ...]  # empty if it always matches
    drawn: tuple[RoutingTarget, ...]
    standing_by: tuple[str, ...]


@dataclass(frozen=True)
class RoutingPanel:
    """A policy as text."""

    rules: tuple[RoutingRule, ...]
    fallbacks: tuple[str, ...]


@dataclass(frozen=True)
class RoutingName:
    name: str
    version: int
    active: bool
    rules: int
    models: tuple[str, ...]
    at: datetime
    by: str
    url: str


@dataclass(frozen=True)
class RoutingVersion:
    version: int
    active: bool
    at: datetime
    by: str
    is_shown: bool
    url: str


@dataclass(frozen=True)
class RoutingDiffLine:
    """A line of a difference. `sign` is +, - or a space."""

    sign: str
    text: str


@dataclass(frozen=True)
class RoutingDetail:
    """One version of an alias, and the list of all versions."""

    name: str
    version: int
    active: bool
    shown: RoutingPanel | None  # None if a release with other rules wrote it
    text: str
    against: int | None  # the version that `diff` compares with
    diff: tuple[RoutingDiffLine, ...]
    versions: tuple[RoutingVersion, ...]
    edit_url: str  # empty without permission, or if not possible
    revert_url: str
    unpublish_url: str


def versions(ctx: PageContext) -> QuerySet[RoutingPolicy]:
    """Return all versions of all aliases. Call inside `ctx.scope()`."""
    found: QuerySet[RoutingPolicy] = RoutingPolicy.objects.for_tenant(ctx.tenant).select_related("created_by")
    return found


def names(ctx: PageContext) -> tuple[RoutingName, ...]:
    """Return each alias with its active version, or its last one if unpublished. Call inside `ctx.scope()`."""
    rows = versions(ctx).order_by("name", "-active", "-version").distinct("name")[:MAX_VERSIONS]
    return tuple(_name(ctx, row) for row in rows)


def detail(ctx: PageContext, row: RoutingPolicy) -> RoutingDetail:
    """Return a version and its changes since the active or the previous version. Call inside `ctx.scope()`."""
    rows = list(versions(ctx).filter(name=row.name).order_by("-version")[:MAX_VERSIONS])
    against = next((policy for policy in rows if policy.active), None)
    if row.active or against is None:
        against = next((policy for policy in rows if policy.version < row.version), None)
    may = ctx.may(Permission.POLICIES_WRITE)
    return RoutingDetail(
        name=row.name,
        version=row.version,
        active=row.active,
        shown=_panel_of(ctx, row),
        text=pretty(row.body),
        against=None if against is None else against.version,
        diff=_diff(against, row),
        versions=tuple(
            RoutingVersion(
                policy.version,
                policy.active,
                policy.created_at,
                _by(policy),
                policy.pk == row.pk,
                ctx.url("routing-detail", policy.pk),
            )
            for policy in rows
        ),
        edit_url=f"{ctx.url('routing-edit')}?from={row.pk}" if may else "",
        revert_url=ctx.url("routing-revert", row.pk) if may and not row.active else "",
        unpublish_url=ctx.url("routing-unpublish", row.pk) if may and row.active else "",
    )


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


def _name(ctx: PageContext, row: RoutingPolicy) -> RoutingName:
    try:
        found = policy.parse(row.body)
        rules, models = len(found.rules), found.models
    except ValueError:
        rules, models = 0, ()
    url = ctx.url("routing-detail", row.pk)
    return RoutingName(row.name, row.version, row.active, rules, models, row.created_at, _by(row), url)


def _by(row: RoutingPolicy) -> str:
    return row.created_by.email if row.created_by else "by a key"


def _rule(number: int, rule: Rule, keys: Mapping[int, str]) -> RoutingRule:
    total = sum(target.weight for target in rule.targets)
    drawn = tuple(
        RoutingTarget(target.model, target.weight, total, f"{target.weight * 1000 // total / 10:g}%")
        for target in rule.targets
        if target.weight
    )
    by = tuple(target.model for target in rule.targets if not target.weight)
    return RoutingRule(number, tuple(_conditions(rule.when, keys)), drawn, by)


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


def _diff(old: RoutingPolicy | None, new: RoutingPolicy) -> tuple[RoutingDiffLine, ...]:
    if old is None:
        return ()
    return diff(pretty(old.body), pretty(new.body))


def diff(old: str, new: str) -> tuple[RoutingDiffLine, ...]:
    """Return all lines with removed and added ones; empty if the texts are equal."""
    if old == new:
        return ()
    lines = difflib.ndiff(old.splitlines(), new.splitlines())
    return tuple(RoutingDiffLine(line[0], line[2:]) for line in lines if line[0] != "?")
