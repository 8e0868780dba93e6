"""Routing policies: aliases, rules as text, versions and differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils.dates import WEEKDAYS_ABBR
from django.utils.translation import gettext as _

from frontend.core.code_labels import code_text
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money, common_places, decimals, duration, exact, share, signed_share
from frontend.core.page_context import PageContext
from millrace.apps.policy_results.shadow_results import ShadowResult, shadow_results
from tenants.models import ApiKey, Project, RoutingPolicy, RoutingPolicyDraft
from tenants.permissions import Permission
from tenants.routing_policies import policy
from tenants.routing_policies.conditions import DAYS
from tenants.routing_policies.diffs import diff, pretty
from tenants.routing_policies.policy import MAX_TARGETS, Escalation, Policy, Rule, When
from tenants.routing_policies.target_checks import TargetChecks

SHADOW_DAYS = 7  # days of shadow results
MAX_VERSIONS = 100  # aliases, or versions of one alias
FALLBACKS = {
    "error": _lazy("worker error"),
    "overload": _lazy("overload"),
    "rate_limit": _lazy("rate limit"),
    "context": _lazy("context overflow"),
    "timeout": _lazy("no token in time"),
}
STRATEGIES = {
    "ordered": _lazy("in order"),
    "cheapest": _lazy("cheapest that fits"),
    "lowest_latency": _lazy("lowest latency"),
    "least_busy": _lazy("least busy"),
}
CHECKS = {
    "schema": _lazy("is not valid under the schema"),
    "tool_arguments": _lazy("has invalid tool arguments"),
    "pattern": _lazy("does not match the pattern"),
    "empty": _lazy("is empty"),
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


def names(ctx: PageContext) -> list[tuple[RoutingPolicy, int, tuple[str, ...], str]]:
    """Return each alias with its active version, or its last one if unpublished, its number of rules, its models and
    the problem of a live one.

    Call inside `ctx.scope()`.
    """
    rows = versions(ctx).order_by("name", "-active", "-version").distinct("name")[:MAX_VERSIONS]
    sized = [(row, *_size(row)) for row in rows]
    checks = TargetChecks(ctx.tenant.pk)
    checks.load(model for row, _, models in sized if row.active for model in models)
    return [
        (*given, next((each.message() for each in checks.of_live(given[0]) if each.is_blocking), "")) for given in sized
    ]


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
        _share(_("Valid under the schema"), live.valid_schemas, shadow.valid_schemas, result.with_schema),
        _share(_("Passed all checks"), live.passed, shadow.passed, result.compared),
    ]
    if result.compared:
        before, after = (side.output_tokens / result.compared for side in (live, shadow))
        rows.append(
            ShadowRow(
                _("Output tokens, mean"),
                decimals(before),
                decimals(after),
                _relative(live.output_tokens, shadow.output_tokens),
            )
        )
    if result.priced:
        costs = [Money(side.cost_femto) for side in (live, shadow)]
        places = common_places(costs)
        change = _relative(live.cost_femto, shadow.cost_femto)
        label = _("Cost of %(count)s requests") % {"count": exact(result.priced)}
        first_cost, second_cost = ("".join(cost.parts_at(places)) for cost in costs)
        rows.append(ShadowRow(label, first_cost, second_cost, change))
    for label, column in ((_("Time to first token"), "ttft"), (_("Duration"), "total")):
        for quantile in ("p50", "p95"):
            first, second = (getattr(side, f"{column}_{quantile}_ms") for side in (live, shadow))
            if first is not None and second is not None:
                texts = duration(first * 1000), duration(second * 1000)
                rows.append(ShadowRow(f"{label}, {quantile}", *texts, _relative(first, second)))
    return ShadowTable(
        result,
        tuple(row for row in rows if row is not None),
        tuple((code_text(code), count) for code, count in result.codes.most_common()),
    )


def _share(label: str, live: int, shadow: int, total: int) -> ShadowRow | None:
    if not total:
        return None
    points = decimals((shadow - live) * 100 / total)
    change = _("%(points)s points") % {"points": f"+{points}" if shadow > live else points}
    return ShadowRow(label, share(live, total), share(shadow, total), change)


def _relative(live: int, shadow: int) -> str:
    return signed_share(shadow - live, live)


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
        return _("no token after %(first_token_ms)s s") % {"first_token_ms": f"{policy.first_token_ms / 1000:g}"}
    return FALLBACKS[condition]


def _policy_facts(policy: Policy) -> Iterator[str]:
    if policy.retries.max_per_request < MAX_TARGETS - 1:
        yield _("A request falls back at most %(max_per_request)s times.") % {
            "max_per_request": policy.retries.max_per_request
        }
    if policy.retries.max_percent is not None:
        yield _("At most %(max_percent)s fallbacks per 100 requests.") % {"max_percent": policy.retries.max_percent}
    if policy.complexity is not None:
        yield _("Complexity classifier: %(name)s.") % {"name": policy.complexity.trained or "trained"}
    if policy.context_overflow == "drop_middle":
        yield _("Messages in the middle of too long conversations are dropped.")
    if policy.context_overflow == "summarize":
        yield _("%(summarizer)s summarizes messages in the middle of too long conversations.") % {
            "summarizer": policy.summarizer
        }
    if policy.semantic_cache:
        yield _("Similar questions may receive cached answers.")
    if policy.shadow is not None:
        yield _("%(model)s also answers %(percent)s%% of the requests, for comparison only.") % {
            "model": policy.shadow.model,
            "percent": policy.shadow.percent,
        }


def _rule(number: int, rule: Rule, keys: Mapping[int, str], projects: Mapping[int, str]) -> dict[str, Any]:
    """Return a rule as text. Without conditions it always matches. Targets without a weight stand by."""
    total = sum(target.weight for target in rule.targets)
    drawn = [(target, share(target.weight, total)) for target in rule.targets if target.weight]
    return {
        "number": number,
        "name": rule.name,
        "strategy": STRATEGIES.get(rule.strategy, ""),
        "escalation": _escalation(rule.escalate) if rule.escalate else "",
        "conditions": list(_conditions(rule.when, keys, projects)),
        "drawn": drawn,
        "total": total,
        "standing_by": [target.model for target in rule.targets if not target.weight],
    }


def _escalation(escalate: Escalation) -> str:
    """Return the checks of an answer as text, with the pattern and the number of further executions."""
    text = _join(CHECKS[check] for check in escalate.on)
    if escalate.pattern:
        text += f": {escalate.pattern}"
    if escalate.max > 1:
        text += _(" (up to %(count)s times)") % {"count": escalate.max}
    return text


def _conditions(when: When, keys: Mapping[int, str], projects: Mapping[int, str]) -> Iterator[str]:
    if (tokens := when.prompt_tokens) is not None:
        if tokens.at_most is None:
            yield _("prompt of %(at_least)s tokens or more") % {"at_least": exact(tokens.at_least)}
        elif not tokens.at_least:
            yield _("prompt of at most %(at_most)s tokens") % {"at_most": exact(tokens.at_most)}
        else:
            yield _("prompt of %(at_least)s to %(at_most)s tokens") % {
                "at_least": exact(tokens.at_least),
                "at_most": exact(tokens.at_most),
            }
    if when.tools is not None:
        yield _("with tools") if when.tools else _("without tools")
    if when.schema is not None:
        yield _("structured output") if when.schema else _("no structured output")
    if when.keys is not None:
        yield _("by key %(listed)s") % {"listed": _join(keys.get(key, f"no. {key}") for key in when.keys)}
    if when.images is not None:
        yield _("with images") if when.images else _("without images")
    if when.task is not None:
        yield _("task %(listed)s") % {"listed": _join(when.task)}
    for name, values in (when.metadata or {}).items():
        yield _("%(name)s is %(listed)s") % {"name": name, "listed": _join(values)}
    if when.projects is not None:
        yield _("in project %(listed)s") % {
            "listed": _join(projects.get(project, _("No. %(pk)s") % {"pk": project}) for project in when.projects)
        }
    if (left := when.budget_left) is not None:
        if left.at_most is None:
            sentence = _("at least %(at_least)s%% of the budget left")
        elif not left.at_least:
            sentence = _("at most %(at_most)s%% of the budget left")
        else:
            sentence = _("at least %(at_least)s%% and at most %(at_most)s%% of the budget left")
        yield sentence % {"at_least": left.at_least, "at_most": left.at_most}
    if (score := when.complexity) is not None:
        if score.at_most is None:
            sentence = _("complexity at least %(at_least)s")
        elif not score.at_least:
            sentence = _("complexity at most %(at_most)s")
        else:
            sentence = _("complexity at least %(at_least)s and at most %(at_most)s")
        yield sentence % {"at_least": score.at_least, "at_most": score.at_most}
    if (hours := when.hours) is not None:
        sentence = _("%(start)s to %(end)s %(zone)s on %(days)s")
        if len(hours.days) == len(DAYS):
            sentence = _("%(start)s to %(end)s %(zone)s")
        yield sentence % {
            "start": hours.start,
            "end": hours.end,
            "zone": hours.zone,
            "days": _join(WEEKDAYS_ABBR[DAYS.index(day)] for day in hours.days),
        }


def _join(parts: Iterable[str]) -> str:
    return ", ".join(map(str, parts))
