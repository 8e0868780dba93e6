"""Routing policies: aliases, rules as text, versions and differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet

from frontend.core.numbers import Money, duration
from frontend.core.page_context import PageContext
from millrace.apps.request_log.shadow_results import ShadowResult, shadow_results
from tenants.models import ApiKey, Project, RoutingPolicy, RoutingPolicyDraft
from tenants.permissions import Permission
from tenants.routing_policies import policy
from tenants.routing_policies.conditions import DAYS
from tenants.routing_policies.diffs import diff, pretty
from tenants.routing_policies.policy import MAX_TARGETS, Policy, Rule, When

SHADOW_DAYS = 7  # of the results of shadows
MAX_VERSIONS = 100  # aliases, or versions of one alias
FALLBACKS = {
    "error": "worker error",
    "overload": "overload",
    "rate_limit": "rate limit",
    "context": "context overflow",
    "timeout": "no token in time",
}
STRATEGIES = {
    "ordered": "in order",
    "cheapest": "cheapest that fits",
    "lowest_latency": "lowest latency",
    "least_busy": "least busy",
}
CHECKS = {
    "schema": "is not valid under the schema",
    "tool_arguments": "has invalid tool arguments",
    "pattern": "does not match the pattern",
    "empty": "is empty",
}


@dataclass(frozen=True)
class RoutingPanel:
    """A policy as text."""

    rules: tuple[dict[str, Any], ...]
    fallbacks: tuple[str, ...]
    more: tuple[str, ...] = ()  # sentences on retries and long conversations


@dataclass(frozen=True)
class ShadowRow:
    """A measure of the returned answers and of those of their shadows."""

    label: str
    live: str
    shadow: str
    change: str


@dataclass(frozen=True)
class ShadowTable:
    """The comparison of a model with its shadow."""

    result: ShadowResult
    rows: tuple[ShadowRow, ...]
    not_answered: tuple[tuple[str, int], ...]  # reason and number of shadows


def versions(ctx: PageContext) -> QuerySet[RoutingPolicy]:
    """Return all versions of all aliases. Call inside `ctx.scope()`."""
    found: QuerySet[RoutingPolicy] = RoutingPolicy.objects.for_tenant(ctx.tenant).select_related("created_by")
    return found


def drafts(ctx: PageContext) -> QuerySet[RoutingPolicyDraft]:
    """Return the drafts of all aliases. Call inside `ctx.scope()`."""
    found: QuerySet[RoutingPolicyDraft] = RoutingPolicyDraft.objects.for_tenant(ctx.tenant).select_related("updated_by")
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
    chosen = ctx.query.get("against", "")
    against = next((policy for policy in rows if str(policy.version) == chosen), None)
    if against is None:
        against = next((policy for policy in rows if policy.active), None)
    if not chosen and (row.active or against is None):
        against = next((policy for policy in rows if policy.version < row.version), None)
    return {
        "version": row,
        "shown": _panel_of(ctx, row),  # None if a release with other rules wrote it
        "text": pretty(row.body),
        "against": against,
        "diff": diff(pretty(against.body), pretty(row.body)) if against else (),
        "versions": rows,
        "others": [other for other in rows if other.pk != row.pk],
        "draft": drafts(ctx).filter(name=row.name).first(),
        "shadow_days": SHADOW_DAYS,
        "shadows": shadow_tables(ctx, row.name) if ctx.may(Permission.USAGE_READ) else (),
    }


def in_words(ctx: PageContext, of: Policy) -> RoutingPanel:
    """Return the policy as text. Call inside `ctx.scope()`."""
    ids = {key for rule in of.rules for key in rule.when.keys or ()}
    keys = dict(ApiKey.objects.for_tenant(ctx.tenant).filter(pk__in=ids).values_list("pk", "name")) if ids else {}
    ids = {project for rule in of.rules for project in rule.when.projects or ()}
    projects = dict(Project.objects.for_tenant(ctx.tenant).filter(pk__in=ids).values_list("pk", "name")) if ids else {}
    return RoutingPanel(
        rules=tuple(_rule(number, rule, keys, projects) for number, rule in enumerate(of.rules, 1)),
        fallbacks=tuple(_fallback(condition, of) for condition in of.fallback_on),
        more=tuple(_policy_facts(of)),
    )


def shadow_tables(ctx: PageContext, name: str) -> list[ShadowTable]:
    """Return the results of an alias's shadows. Call inside `ctx.scope()`."""
    start = ctx.now - timedelta(days=SHADOW_DAYS)
    return [_shadow_table(result) for result in shadow_results(ctx.tenant.pk, name, start, ctx.now)]


def _shadow_table(result: ShadowResult) -> ShadowTable:
    live, shadow = result.answered, result.shadow
    rows = [
        _share("Valid under the schema", live.valid_schemas, shadow.valid_schemas, result.with_schema),
        _share("Passed all checks", live.passed, shadow.passed, result.compared),
    ]
    if result.compared:
        before, after = (side.output_tokens / result.compared for side in (live, shadow))
        rows.append(ShadowRow("Output tokens, mean", f"{before:,.1f}", f"{after:,.1f}", _relative(before, after)))
    if result.priced:
        costs = [Money(side.cost_femto) for side in (live, shadow)]
        change = _relative(live.cost_femto, shadow.cost_femto)
        rows.append(ShadowRow(f"Cost of {result.priced:,} requests", costs[0].text, costs[1].text, change))
    for label, column in (("Time to first token", "ttft"), ("Duration", "total")):
        for quantile in ("p50", "p95"):
            first, second = (getattr(side, f"{column}_{quantile}_ms") for side in (live, shadow))
            if first is not None and second is not None:
                texts = duration(first * 1000), duration(second * 1000)
                rows.append(ShadowRow(f"{label}, {quantile}", *texts, _relative(first, second)))
    return ShadowTable(
        result,
        tuple(row for row in rows if row is not None),
        tuple((code.replace("_", " "), count) for code, count in result.codes.most_common()),
    )


def _share(label: str, live: int, shadow: int, total: int) -> ShadowRow | None:
    if not total:
        return None
    points = (shadow - live) * 100 / total
    return ShadowRow(label, f"{live / total:.1%}", f"{shadow / total:.1%}", f"{points:+.1f} points".replace("-", "−"))


def _relative(live: float, shadow: float) -> str:
    return f"{shadow / live - 1:+.1%}".replace("-", "−") if live else "–"


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


def _fallback(condition: str, policy: Policy) -> str:
    if condition == "timeout" and policy.first_token_ms is not None:
        return f"no token after {policy.first_token_ms / 1000:g} s"
    return FALLBACKS[condition]


def _policy_facts(policy: Policy) -> Iterator[str]:
    if policy.retries.max_per_request < MAX_TARGETS - 1:
        yield f"A request falls back at most {policy.retries.max_per_request} times."
    if policy.retries.max_percent is not None:
        yield f"At most {policy.retries.max_percent} fallbacks per 100 requests."
    if policy.complexity is not None:
        yield f"Complexity classifier: {policy.complexity.trained or 'trained'}."
    if policy.context_overflow == "drop_middle":
        yield "Messages in the middle of too long conversations are dropped."
    if policy.context_overflow == "summarize":
        yield f"{policy.summarizer} summarizes messages in the middle of too long conversations."
    if policy.semantic_cache:
        yield "Similar questions may receive cached answers."
    if policy.shadow is not None:
        yield f"{policy.shadow.model} also answers {policy.shadow.percent}% of the requests, for comparison only."


def _rule(number: int, rule: Rule, keys: Mapping[int, str], projects: Mapping[int, str]) -> dict[str, Any]:
    """Return a rule as text. Without conditions it always matches. Targets without a weight stand by."""
    total = sum(target.weight for target in rule.targets)
    drawn = [(target, f"{target.weight * 1000 // total / 10:g}%") for target in rule.targets if target.weight]
    return {
        "number": number,
        "name": rule.name,
        "strategy": STRATEGIES.get(rule.strategy, ""),
        "escalation": _listed(CHECKS[check] for check in rule.escalate.on) if rule.escalate else "",
        "conditions": list(_conditions(rule.when, keys, projects)),
        "drawn": drawn,
        "total": total,
        "standing_by": [target.model for target in rule.targets if not target.weight],
    }


def _conditions(when: When, keys: Mapping[int, str], projects: Mapping[int, str]) -> Iterator[str]:
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
    if when.images is not None:
        yield "with images" if when.images else "without images"
    if when.task is not None:
        yield f"task {_listed(when.task)}"
    for name, values in (when.metadata or {}).items():
        yield f"{name} is {_listed(values)}"
    if when.projects is not None:
        yield f"in project {_listed(projects.get(project, f'no. {project}') for project in when.projects)}"
    if (left := when.budget_left) is not None:
        most = "" if left.at_most is None else f"at most {left.at_most}%"
        least = f"at least {left.at_least}%" if left.at_least or not most else ""
        yield f"{' and '.join(filter(None, (least, most)))} of the budget left"
    if (score := when.complexity) is not None:
        most = "" if score.at_most is None else f"at most {score.at_most}"
        least = f"at least {score.at_least}" if score.at_least or not most else ""
        yield f"complexity {' and '.join(filter(None, (least, most)))}"
    if (hours := when.hours) is not None:
        days = "" if len(hours.days) == len(DAYS) else f" on {_listed(day.capitalize() for day in hours.days)}"
        yield f"{hours.start} to {hours.end} {hours.zone}{days}"


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)
