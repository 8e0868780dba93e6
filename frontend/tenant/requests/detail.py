"""View models of one request: limits, routing, executions and the calculation of its cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.http import urlencode

from billing.models import Adjustment, UsageEvent
from frontend.core.labels import outcome_label
from frontend.core.numbers import Money, duration, exact, exact_places
from frontend.core.page_context import PageContext
from frontend.tenant.requests.log import KINDS, bound_text, status_text
from inference_worker.contract.request import TOKEN_CLASSES
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
from millrace.apps.request_log.request_budgets import HeldFrom
from millrace.apps.request_log.selectors import RequestExecution, RequestStory
from tenants.models import ApiKey, Project
from tenants.permissions import Permission

BY = {
    "prefix": "prefix cached",
    "spill": "prefix replica overloaded",
    "load": "least busy",
}
MISSES = {
    "too_short": "prompt shorter than one cache block",
    "first_use": "new prefix",
    "expired_or_evicted": "expired or evicted",
    "other_worker": "cached on another replica or before a restart",
    "prefix_changed": "prefix changed",
}
COMPONENTS = {
    "uncached": "Input",
    "cache_read": "Cache reads",
    "cache_write_5m": "Cache writes, 5 min",
    "cache_write_1h": "Cache writes, 1 h",
    "output": "Output",
    "answer_hit_input": "Cached response, input",
    "answer_hit_output": "Cached response, output",
}
WRITE_DELAY = timedelta(minutes=1)  # records and usage are written in bulk, some seconds after a request's end


@dataclass(frozen=True)
class RequestDetailEntry:
    label: str
    value: str
    mono: bool = False


@dataclass(frozen=True)
class RequestDetailLimitRow:
    name: str
    of: str
    limit: int
    left: int
    cost: int
    result: str  # "passed", "refused", "would have refused"
    kind: str


@dataclass(frozen=True)
class RequestDetailBudgetRow:
    name: str
    of: str
    limit: str  # present limit
    raised: str  # the part of the limit that is a temporary increase; empty without one
    raised_until: datetime | None
    url: str


@dataclass(frozen=True)
class PlaceRow:
    replica: str
    model: str
    execution: int
    attempt: int
    reason: str
    queued_us: int
    load: int


@dataclass(frozen=True)
class RequestDetailStep:
    """One part of an execution's duration."""

    label: str
    us: int
    whole_us: int


@dataclass(frozen=True)
class LineRow:
    label: str
    tokens: int
    price: Money  # per 1M tokens
    cost: Money


@dataclass(frozen=True)
class AdjustmentRow:
    label: str
    at: datetime
    cost: Money


@dataclass(frozen=True)
class ExecutionCard:
    number: int
    model: str
    replica: str
    outcome: str
    kind: str
    finish: str
    steps: tuple[RequestDetailStep, ...]
    tokens: tuple[tuple[str, int], ...]
    miss: str
    lines: tuple[LineRow, ...]
    adjustments: tuple[AdjustmentRow, ...]
    cost: Money
    price_places: int  # decimals that show all digits of every price
    cost_places: int
    prices_from: tuple[datetime, ...]  # effective times of the prices
    settled_at: datetime


@dataclass(frozen=True)
class RequestDetailContent:
    body: str
    answers: tuple[str, ...]
    truncated: bool


@dataclass(frozen=True)
class RequestDetailDelivery:
    request_id: str
    at: datetime
    outcome: str
    kind: str
    status: str
    why_not: str  # the limit or error; empty for an answered request
    bound: tuple[RequestDetailEntry, ...]
    facts: tuple[RequestDetailEntry, ...]
    limits: tuple[RequestDetailLimitRow, ...]
    budgets: tuple[RequestDetailBudgetRow, ...]
    rejecting_budget: RequestDetailBudgetRow | None
    route: tuple[RequestDetailEntry, ...]
    skipped: tuple[RequestDetailEntry, ...]
    places: tuple[PlaceRow, ...]
    executions: tuple[ExecutionCard, ...]
    ran: bool  # true if usage is settled or will be
    hold: Money | None
    cost: Money
    saved: Money
    content: RequestDetailContent | None
    keeps_content: bool
    others: tuple[tuple[str, str], ...]  # URLs and names of repeated requests
    replay_url: str
    recorded: bool
    writing: bool  # true while records may still arrive
    url: str


def request_detail(ctx: PageContext, request_id: str) -> RequestDetailDelivery | None:
    """Return the details of a request; None if the tenant has no such request."""
    found = selectors.story(ctx.tenant.pk, request_id[:64].replace("\0", ""))
    if found is None:
        return None
    record, first = found.record, found.executions[0].event if found.executions else None
    code, bound = (record.code, record.limited_by) if record else ("", None)
    rejecting = found.rejecting_budget
    outcome = record.outcome if record else str(getattr(first, "outcome", RequestOutcome.COMPLETED))
    return RequestDetailDelivery(
        request_id=found.request_id,
        at=record.started_at if record else found.executions[0].event.admitted_at,
        outcome=outcome_label(outcome),
        kind=KINDS[outcome],
        status=record.status if record else "",
        why_not=status_text(code, bound),
        bound=tuple(_bound(bound)) if bound else (),
        facts=tuple(_entries(ctx, record, first)),
        limits=tuple(_limit(limit) for limit in record.limits) if record else (),
        budgets=tuple(_budget(ctx, budget) for budget in found.budgets),
        rejecting_budget=_budget(ctx, rejecting) if rejecting else None,
        route=tuple(_route(record)) if record else (),
        skipped=tuple(
            RequestDetailEntry(entry["model"], entry["reason"].replace("_", " "), mono=True)
            for entry in _skipped(record)
        ),
        places=tuple(_place(placement) for placement in record.placements) if record else (),
        executions=tuple(_execution(execution) for execution in found.executions),
        ran=bool(found.executions or (record and record.placements)),
        hold=None if found.reserved_nano is None else Money.nano(found.reserved_nano),
        cost=Money(found.cost_femto),
        saved=Money(found.saved_femto),
        content=_content(found),
        keeps_content=ctx.tenant.content_retention_days > 0,
        others=tuple((ctx.url("requests-detail", replay.request_id), replay.request_id) for replay in _replays(found)),
        replay_url=_replay(ctx, found),
        recorded=record is not None,
        writing=_writing(ctx, found),
        url=ctx.url("requests-detail", found.request_id),
    )


def _writing(ctx: PageContext, found: RequestStory) -> bool:
    if found.record is None:
        return ctx.now - max(execution.event.settled_at for execution in found.executions) < WRITE_DELAY
    ran_on = not found.executions and bool(found.record.placements)
    return ran_on and ctx.now - found.record.started_at < WRITE_DELAY


def _bound(bound: Mapping[str, Any]) -> list[RequestDetailEntry]:
    unit = str(bound.get("unit", ""))
    facts = [RequestDetailEntry("Limit or budget", bound_text(bound))]
    for name, label in (("limit", "Limit"), ("left", "Left"), ("needed", "Needed")):
        if name in bound:
            facts.append(RequestDetailEntry(label, _amount(int(bound[name]), unit)))
    if bound.get("reset_ms"):
        facts.append(RequestDetailEntry("Retry after", duration(int(bound["reset_ms"]) * 1000)))
    if bound.get("resets_at"):
        facts.append(RequestDetailEntry("Resets at", str(bound["resets_at"])[:16].replace("T", " ") + " UTC"))
    return facts


def _entries(ctx: PageContext, record: RequestRecord | None, first: UsageEvent | None) -> list[RequestDetailEntry]:
    source = record or first
    if source is None:
        return []
    key = ApiKey.objects.for_tenant(ctx.tenant).filter(pk=source.key_id).values_list("name", flat=True).first()
    project = Project.objects.for_tenant(ctx.tenant).filter(pk=source.project_id).values_list("name", flat=True).first()
    facts = [
        RequestDetailEntry("Key", key or f"Key {source.key_id}, deleted"),
        RequestDetailEntry("Project", project or f"Project {source.project_id}, deleted"),
    ]
    if record is not None:
        facts += [RequestDetailEntry("Endpoint", record.endpoint + (", streamed" if record.stream else ""))]
        facts += [RequestDetailEntry("Requested model", record.requested_model or "–", mono=True)]
        if served := selectors.served_model(record):
            facts.append(RequestDetailEntry("Served model", served, mono=True))
        if record.ttft_ms is not None:
            facts.append(RequestDetailEntry("Time to first token", duration(record.ttft_ms * 1000)))
        facts.append(RequestDetailEntry("Total latency (client)", duration(record.total_ms * 1000)))
        if record.prompt_tokens is not None:
            facts.append(RequestDetailEntry("Prompt", f"{exact(record.prompt_tokens)} tokens"))
        if record.max_tokens is not None:
            facts.append(RequestDetailEntry("max_tokens", f"{exact(record.max_tokens)} tokens"))
        if record.batch_id is not None:
            facts.append(RequestDetailEntry("Batch line", exact((record.batch_line or 0) + 1)))
        facts.append(RequestDetailEntry("Gateway", record.gateway_id, mono=True))
    return facts


def _budget(ctx: PageContext, budget: HeldFrom) -> RequestDetailBudgetRow:
    return RequestDetailBudgetRow(
        budget.name,
        f"{budget.scope}, {budget.period}",
        _amount(budget.limit, budget.unit),
        _amount(budget.temporary_increase, budget.unit) if budget.temporary_increase else "",
        budget.increase_expires_at,
        ctx.url("budgets-detail", budget.budget_id) if ctx.may(Permission.LIMITS_READ) else "",
    )


def _limit(check: Mapping[str, Any]) -> RequestDetailLimitRow:
    refused, dry = check.get("refused", False), check.get("dry", False)
    result = ("would have been rejected" if dry else "rejected") if refused else "passed (dry run)" if dry else "passed"
    of = str(check["scope"]) + (f", {check['model']}" if check.get("model") else "")
    kind = ("warn" if dry else "bad") if refused else "good"
    name = str(check["name"]).replace("_", " ")
    return RequestDetailLimitRow(name, of, check["limit"], check["left"], check.get("cost", 0), result, kind)


def _route(record: RequestRecord) -> list[RequestDetailEntry]:
    route = record.route
    policy = route.get("policy")
    if policy is None:
        return [RequestDetailEntry("Policy", "None (model requested by name)")]
    return [
        RequestDetailEntry("Policy", f"{record.requested_model}, version {policy['version']}"),
        RequestDetailEntry("Rule", f"{policy['rule'] + 1} (first match)"),
        RequestDetailEntry("Targets in order", ", ".join(route.get("targets", ())), mono=True),
    ]


def _skipped(record: RequestRecord | None) -> list[dict[str, str]]:
    return [] if record is None else list(record.route.get("skipped", ()))


def _place(placement: Mapping[str, Any]) -> PlaceRow:
    return PlaceRow(
        str(placement["replica"]),
        str(placement["model"]),
        int(placement["execution"]) + 1,
        int(placement["attempt"]),
        BY.get(str(placement["by"]), str(placement["by"])),
        int(placement.get("queued_ms", 0)) * 1000,
        int(placement.get("load", 0)),
    )


def _execution(execution: RequestExecution) -> ExecutionCard:
    event, adjusted = execution.event, sum(int(adjustment.cost_femto) for adjustment in execution.adjustments)
    whole = max(event.duration_us, 1)
    lines = tuple(
        LineRow(COMPONENTS[line.component], line.tokens, Money.nano(line.nano_per_million), Money(line.femto))
        for line in execution.lines
    )
    adjustments = tuple(
        AdjustmentRow(_place_reason(adjustment), adjustment.created_at, Money(int(adjustment.cost_femto)))
        for adjustment in execution.adjustments
    )
    cost = Money(int(event.cost_femto) + adjusted)
    parts = (
        ("Queue", event.queue_us),
        ("Prefill", execution.prefill_us),
        ("Decode", execution.decode_us),
    )
    return ExecutionCard(
        event.execution + 1,
        event.model,
        event.replica_id,
        outcome_label(event.outcome),
        KINDS[event.outcome],
        event.finish_reason.replace("_", " "),
        tuple(RequestDetailStep(label, us, whole) for label, us in parts),
        tuple((COMPONENTS[name], getattr(event, name)) for name in TOKEN_CLASSES),
        _miss(event),
        lines,
        adjustments,
        cost,
        exact_places(line.price for line in lines),
        exact_places([*(line.cost for line in lines), *(row.cost for row in adjustments), cost]),
        tuple(sorted({line.effective_from for line in execution.lines})),
        event.settled_at,
    )


def _miss(event: UsageEvent) -> str:
    text = MISSES.get(event.miss_reason, event.miss_reason.replace("_", " "))
    if event.miss_reason == "prefix_changed":
        return text + (f" from token {exact(event.changed_at)}" if event.changed_at is not None else "")
    return text


def _place_reason(adjustment: Adjustment) -> str:
    return {"failed": "Corrected: failed", "cancelled": "Corrected: cancelled"}.get(
        adjustment.outcome, "Written off: too late"
    )


def _content(found: RequestStory) -> RequestDetailContent | None:
    content = found.content
    if content is None:
        return None
    try:
        body = json.dumps(json.loads(content.body), indent=2, ensure_ascii=False)
    except ValueError:
        body = content.body
    return RequestDetailContent(body, tuple(content.answers), content.truncated)


def _replays(found: RequestStory) -> list[RequestRecord]:
    return [replay for replay in found.others if replay.replay_of == found.request_id]


def _replay(ctx: PageContext, found: RequestStory) -> str:
    """Return the URL of the playground with this request; its prompt is included if it is stored."""
    url = ctx.url("playground") if ctx.may(Permission.KEYS_READ) else ""
    if not url or found.record is None or found.record.endpoint == "embeddings":
        return ""
    context = {"request": found.request_id} if found.content is not None else {"model": found.record.requested_model}
    return f"{url}?{urlencode(context)}"


def _amount(amount: int, unit: str) -> str:
    if unit == "money":
        return Money.nano(amount).text
    return f"{exact(amount)} {unit}".strip()
