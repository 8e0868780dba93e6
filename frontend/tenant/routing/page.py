"""Routing policies as the page shows them: names, rules in words, versions, what differs between two."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet

from frontend.core.page_context import PageContext
from frontend.tenant.routing.places import pretty
from tenants.models import ApiKey, RoutingPolicy
from tenants.permissions import Permission
from tenants.routing_policies import policy
from tenants.routing_policies.policy import Policy, Rule, When

MOST = 100  # names, and versions of one
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
    of: int  # the rule's weights together
    share: str  # empty: it stands by


@dataclass(frozen=True)
class RuleShown:
    number: int
    conditions: tuple[str, ...]  # empty: always
    drawn: tuple[RoutingTarget, ...]
    standing_by: tuple[str, ...]


@dataclass(frozen=True)
class RoutingPanel:
    """A policy in words."""

    rules: tuple[RuleShown, ...]
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
class RoutingChanged:
    """A line of the difference. `sign`: + - or a space."""

    sign: str
    text: str


@dataclass(frozen=True)
class One:
    """A version of a name, and the others."""

    name: str
    version: int
    active: bool
    shown: RoutingPanel | None  # None: of a release that knew other rules
    text: str
    against: int | None  # the version it is compared with
    diff: tuple[RoutingChanged, ...]
    versions: tuple[RoutingVersion, ...]
    edit_url: str  # these, empty: this person may not, or there is nothing to do
    revert_url: str
    withdraw_url: str


def versions(visit: PageContext) -> QuerySet[RoutingPolicy]:
    """All versions of all names. In the visit's scope."""
    found: QuerySet[RoutingPolicy] = RoutingPolicy.objects.for_tenant(visit.tenant).select_related("created_by")
    return found


def names(visit: PageContext) -> tuple[RoutingName, ...]:
    """Each name with the active version, or its last one if it was withdrawn. In the visit's scope."""
    rows = versions(visit).order_by("name", "-active", "-version").distinct("name")[:MOST]
    return tuple(_name(visit, row) for row in rows)


def one(visit: PageContext, row: RoutingPolicy) -> One:
    """Return a version, compared with the one active, or, if it is that, with the one before. In the visit's scope."""
    rows = list(versions(visit).filter(name=row.name).order_by("-version")[:MOST])
    against = next((each for each in rows if each.active), None)
    if row.active or against is None:
        against = next((each for each in rows if each.version < row.version), None)
    may = visit.may(Permission.POLICIES_WRITE)
    return One(
        name=row.name,
        version=row.version,
        active=row.active,
        shown=_shown(visit, row),
        text=pretty(row.body),
        against=None if against is None else against.version,
        diff=_diff(against, row),
        versions=tuple(
            RoutingVersion(
                each.version,
                each.active,
                each.created_at,
                _by(each),
                each.pk == row.pk,
                visit.url("routing-detail", each.pk),
            )
            for each in rows
        ),
        edit_url=f"{visit.url('routing-edit')}?from={row.pk}" if may else "",
        revert_url=visit.url("routing-revert", row.pk) if may and not row.active else "",
        withdraw_url=visit.url("routing-withdraw", row.pk) if may and row.active else "",
    )


def in_words(visit: PageContext, of: Policy) -> RoutingPanel:
    """Return the policy as a person reads it. In the visit's scope."""
    ids = {key for rule in of.rules for key in rule.when.keys or ()}
    keys = dict(ApiKey.objects.for_tenant(visit.tenant).filter(pk__in=ids).values_list("pk", "name")) if ids else {}
    return RoutingPanel(
        rules=tuple(_rule(number, rule, keys) for number, rule in enumerate(of.rules, 1)),
        fallbacks=tuple(FALLBACKS[each] for each in of.fallback_on),
    )


def _shown(visit: PageContext, row: RoutingPolicy) -> RoutingPanel | None:
    try:
        return in_words(visit, policy.parse(row.body))
    except ValueError:
        return None


def _name(visit: PageContext, row: RoutingPolicy) -> RoutingName:
    try:
        found = policy.parse(row.body)
        rules, models = len(found.rules), found.models
    except ValueError:
        rules, models = 0, ()
    url = visit.url("routing-detail", row.pk)
    return RoutingName(row.name, row.version, row.active, rules, models, row.created_at, _by(row), url)


def _by(row: RoutingPolicy) -> str:
    return row.created_by.email if row.created_by else "by a key"


def _rule(number: int, rule: Rule, keys: Mapping[int, str]) -> RuleShown:
    total = sum(target.weight for target in rule.targets)
    drawn = tuple(
        RoutingTarget(target.model, target.weight, total, f"{target.weight * 1000 // total / 10:g}%")
        for target in rule.targets
        if target.weight
    )
    by = tuple(target.model for target in rule.targets if not target.weight)
    return RuleShown(number, tuple(_conditions(rule.when, keys)), drawn, by)


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


def _diff(old: RoutingPolicy | None, new: RoutingPolicy) -> tuple[RoutingChanged, ...]:
    if old is None:
        return ()
    return diff(pretty(old.body), pretty(new.body))


def diff(old: str, new: str) -> tuple[RoutingChanged, ...]:
    """Every line, with what was taken out and put in; nothing if they are alike."""
    if old == new:
        return ()
    lines = difflib.ndiff(old.splitlines(), new.splitlines())
    return tuple(RoutingChanged(line[0], line[2:]) for line in lines if line[0] != "?")
