"""Dry run of a routing policy on recent requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from frontend.core.page_context import PageContext
from millrace.apps.request_log.models import RequestRecord
from tenants.routing_policies.policy import Decision, Policy, RoutingFacts, decide

DAYS = 7
MAX_REQUESTS = 500  # requests in a dry run
MAX_ROWS = 12
MAX_MODELS = "*"  # in total
UNKNOWN = "Unknown"


@dataclass(frozen=True)
class DryDecision:
    """A request with the model it went to first, and the one it would go to."""

    record: RequestRecord
    was: str
    would: str
    rule: str


@dataclass(frozen=True)
class RoutingDryRun:
    requests: int
    moved: int
    undecided: int  # depends on tools or a schema, which the log does not contain
    homeless: int  # no rule matches: 404
    shares: list[tuple[str, int, int]]  # target, and how many requests went and would go to it first
    rows: list[DryDecision]  # requests that would go to another model
    every: bool  # true for requests of all models, not only of this alias


def dry_run(ctx: PageContext, policy: Policy, name: str) -> RoutingDryRun:
    """Decide the newest requests of the last days again. Call inside `ctx.scope()`.

    The requests are those for `name`, or all of them if the query string says so. Weights are drawn by request ID, like
    before.
    """
    every = ctx.request.POST.get("of", ctx.query.get("of", "")) == MAX_MODELS
    rows = RequestRecord.objects.for_tenant(ctx.tenant).filter(
        started_at__gte=ctx.now - timedelta(days=DAYS), prompt_tokens__isnull=False
    )
    if not every:
        rows = rows.filter(requested_model=name)
    tried = [_decide(row, policy) for row in rows.order_by("-started_at")[:MAX_REQUESTS]]
    moved = [decision for decision in tried if decision.was != decision.would]
    return RoutingDryRun(
        requests=len(tried),
        moved=len(moved),
        undecided=sum(decision.would == UNKNOWN for decision in tried),
        homeless=sum(decision.would == "" for decision in tried),
        shares=_shares(tried),
        rows=moved[:MAX_ROWS],
        every=every,
    )


def _decide(record: RequestRecord, policy: Policy) -> DryDecision:
    """Decide one request.

    The log does not contain whether it had tools or a schema; if a rule depends on that, the target is unknown.
    """
    found = {_decided(record, policy, tools, schema) for tools in (False, True) for schema in (False, True)}
    targets = record.route.get("targets") or [record.served_model]
    if len(found) > 1:
        return DryDecision(record, targets[0], UNKNOWN, "")
    (decision,) = found
    if decision is None:
        return DryDecision(record, targets[0], "", "")
    return DryDecision(record, targets[0], decision.models[0], str(decision.rule + 1))


def _decided(record: RequestRecord, policy: Policy, tools: bool, schema: bool) -> Decision | None:
    tokens = record.prompt_tokens or 0
    return decide(policy, RoutingFacts(record.request_id, record.key_id, tokens, tools, schema, record.started_at))


def _shares(tried: Iterable[DryDecision]) -> list[tuple[str, int, int]]:
    tried = list(tried)
    was, would = Counter(decision.was for decision in tried), Counter(decision.would for decision in tried)
    models = sorted({*was, *would} - {""}, key=lambda model: (-would[model], -was[model], model))
    return [(model, was[model], would[model]) for model in models]
