"""The story of one request, as the drawer tells it: from the limits that were checked to the arithmetic of its cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.http import urlencode

from billing.amounts import decimal
from billing.models import Adjustment, UsageEvent
from frontend.core.labels import verdict_label
from frontend.core.numbers import Money, duration, exact
from frontend.core.page_context import PageContext
from frontend.tenant.requests.log import KINDS, bound_label, said
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
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
TOKENS = tuple(COMPONENTS)[:5]
WRITING = timedelta(minutes=1)  # records and usage are written in bulk, some seconds after a request's end


@dataclass(frozen=True)
class Fact:
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
    verdict: str  # "passed", "refused", "would have refused"
    kind: str


@dataclass(frozen=True)
class RequestDetailBudgetRow:
    name: str
    of: str
    amount: str


@dataclass(frozen=True)
class PlaceRow:
    replica: str
    model: str
    execution: int
    attempt: int
    why: str
    queued_us: int
    load: int
    credits: int


@dataclass(frozen=True)
class RequestDetailStep:
    """A part of the time an execution took."""

    label: str
    us: int
    whole_us: int


@dataclass(frozen=True)
class LineRow:
    label: str
    tokens: int
    price: str  # USD a million
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
    price_version: int | None
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
    verdict: str
    kind: str
    status: str
    why_not: str  # the limit that bound, or the error; empty: it was answered
    bound: tuple[Fact, ...]
    facts: tuple[Fact, ...]
    limits: tuple[RequestDetailLimitRow, ...]
    budgets: tuple[RequestDetailBudgetRow, ...]
    route: tuple[Fact, ...]
    skipped: tuple[Fact, ...]
    places: tuple[PlaceRow, ...]
    executions: tuple[ExecutionCard, ...]
    ran: bool  # something is settled, or still to be
    hold: Money | None
    cost: Money
    saved: Money
    content: RequestDetailContent | None
    keeps_content: bool
    others: tuple[tuple[str, str], ...]  # addresses and names of replays
    replay_url: str
    recorded: bool
    writing: bool  # more of it is to come in the next seconds
    url: str


def told(visit: PageContext, request_id: str) -> RequestDetailDelivery | None:
    """Return the story; None: the tenant has no such request."""
    found = selectors.story(visit.tenant.pk, request_id[:64].replace("\0", ""))
    if found is None:
        return None
    record, first = found.record, found.executions[0].event if found.executions else None
    code, bound = (record.code, record.limited_by) if record else ("", None)
    verdict = record.outcome if record else str(getattr(first, "outcome", RequestOutcome.COMPLETED))
    return RequestDetailDelivery(
        request_id=found.request_id,
        at=record.started_at if record else found.executions[0].event.admitted_at,
        verdict=verdict_label(verdict),
        kind=KINDS[verdict],
        status=record.status if record else "",
        why_not=said(code, bound),
        bound=tuple(_bound(bound)) if bound else (),
        facts=tuple(_facts(visit, record, first)),
        limits=tuple(_limit(each) for each in record.limits) if record else (),
        budgets=tuple(
            RequestDetailBudgetRow(b.name, f"{b.scope}, {b.period}", _amount(b.amount, b.unit)) for b in found.budgets
        ),
        route=tuple(_route(record)) if record else (),
        skipped=tuple(Fact(each["model"], each["reason"].replace("_", " "), mono=True) for each in _skipped(record)),
        places=tuple(_place(each) for each in record.placements) if record else (),
        executions=tuple(_execution(execution) for execution in found.executions),
        ran=bool(found.executions or (record and record.placements)),
        hold=None if found.reserved_nano is None else Money.nano(found.reserved_nano),
        cost=Money(found.cost_femto),
        saved=Money(found.saved_femto),
        content=_content(found),
        keeps_content=visit.tenant.content_retention_days > 0,
        others=tuple((visit.url("requests-detail", each.request_id), each.request_id) for each in _replays(found)),
        replay_url=_replay(visit, found),
        recorded=record is not None,
        writing=_writing(visit, found),
        url=visit.url("requests-detail", found.request_id),
    )


def _writing(visit: PageContext, found: RequestStory) -> bool:
    if found.record is None:
        return visit.now - max(execution.event.settled_at for execution in found.executions) < WRITING
    ran_on = not found.executions and bool(found.record.placements)
    return ran_on and visit.now - found.record.started_at < WRITING


def _bound(bound: Mapping[str, Any]) -> list[Fact]:
    unit = str(bound.get("unit", ""))
    kind, scope = str(bound["kind"]), str(bound.get("scope", ""))
    facts = [Fact("Limit or budget", bound_label(kind, scope, str(bound["name"]), str(bound.get("model", ""))))]
    for name, label in (("limit", "Limit"), ("left", "Left"), ("needed", "Needed")):
        if name in bound:
            facts.append(Fact(label, _amount(int(bound[name]), unit)))
    if bound.get("reset_ms"):
        facts.append(Fact("Retry after", duration(int(bound["reset_ms"]) * 1000)))
    if bound.get("resets_at"):
        facts.append(Fact("Resets at", str(bound["resets_at"])[:16].replace("T", " ") + " UTC"))
    return facts


def _facts(visit: PageContext, record: RequestRecord | None, first: UsageEvent | None) -> list[Fact]:
    source = record or first
    if source is None:
        return []
    key = ApiKey.objects.for_tenant(visit.tenant).filter(pk=source.key_id).values_list("name", flat=True).first()
    project = (
        Project.objects.for_tenant(visit.tenant).filter(pk=source.project_id).values_list("name", flat=True).first()
    )
    facts = [
        Fact("Key", key or f"Key {source.key_id}, deleted"),
        Fact("Project", project or f"Project {source.project_id}, deleted"),
    ]
    if record is not None:
        facts += [Fact("Endpoint", record.endpoint + (", streamed" if record.stream else ""))]
        facts += [Fact("Requested model", record.requested_model or "–", mono=True)]
        facts += [Fact("Served model", record.served_model or "None", mono=True)]
        if record.ttft_ms is not None:
            facts.append(Fact("Time to first token", duration(record.ttft_ms * 1000)))
        facts.append(Fact("Total latency (client)", duration(record.total_ms * 1000)))
        if record.prompt_tokens is not None:
            facts.append(Fact("Prompt", f"{exact(record.prompt_tokens)} tokens"))
        if record.max_tokens is not None:
            facts.append(Fact("max_tokens", f"{exact(record.max_tokens)} tokens"))
        if record.batch_id is not None:
            facts.append(Fact("Batch line", exact((record.batch_line or 0) + 1)))
        facts.append(Fact("Gateway", record.gateway_id, mono=True))
    return facts


def _limit(each: Mapping[str, Any]) -> RequestDetailLimitRow:
    refused, dry = each.get("refused", False), each.get("dry", False)
    verdict = (
        ("would have been rejected" if dry else "rejected") if refused else "passed (dry run)" if dry else "passed"
    )
    of = str(each["scope"]) + (f", {each['model']}" if each.get("model") else "")
    kind = ("warn" if dry else "bad") if refused else "good"
    name = str(each["name"]).replace("_", " ")
    return RequestDetailLimitRow(name, of, each["limit"], each["left"], each.get("cost", 0), verdict, kind)


def _route(record: RequestRecord) -> list[Fact]:
    route = record.route
    policy = route.get("policy")
    if policy is None:
        return [Fact("Policy", "None (model requested by name)")]
    return [
        Fact("Policy", f"{record.requested_model}, version {policy['version']}"),
        Fact("Rule", f"{policy['rule'] + 1} (first match)"),
        Fact("Targets in order", ", ".join(route.get("targets", ())), mono=True),
    ]


def _skipped(record: RequestRecord | None) -> list[dict[str, str]]:
    return [] if record is None else list(record.route.get("skipped", ()))


def _place(each: Mapping[str, Any]) -> PlaceRow:
    return PlaceRow(
        str(each["replica"]),
        str(each["model"]),
        int(each["execution"]) + 1,
        int(each["attempt"]),
        BY.get(str(each["by"]), str(each["by"])),
        int(each.get("queued_ms", 0)) * 1000,
        int(each.get("load", 0)),
        int(each.get("credits", 0)),
    )


def _execution(execution: RequestExecution) -> ExecutionCard:
    event, adjusted = execution.event, sum(int(each.cost_femto) for each in execution.adjustments)
    whole = max(event.duration_us, 1)
    parts = (
        ("Queue", event.queue_us),
        ("Prefill", execution.prefill_us),
        ("Decode", execution.decode_us),
    )
    return ExecutionCard(
        event.execution + 1,
        event.model,
        event.replica_id,
        verdict_label(event.outcome),
        KINDS[event.outcome],
        event.finish_reason.replace("_", " "),
        tuple(RequestDetailStep(label, us, whole) for label, us in parts),
        tuple((COMPONENTS[name], getattr(event, name)) for name in TOKENS),
        _miss(event),
        tuple(
            LineRow(COMPONENTS[line.component], line.tokens, decimal(line.nano_per_million, 9, 2), Money(line.femto))
            for line in execution.lines
        ),
        tuple(
            AdjustmentRow(_why(each), each.created_at, Money(int(each.cost_femto))) for each in execution.adjustments
        ),
        Money(int(event.cost_femto) + adjusted),
        event.price_version,
        event.settled_at,
    )


def _miss(event: UsageEvent) -> str:
    text = MISSES.get(event.miss_reason, event.miss_reason.replace("_", " "))
    if event.miss_reason == "prefix_changed":
        return text + (f" from token {exact(event.changed_at)}" if event.changed_at is not None else "")
    return text


def _why(each: Adjustment) -> str:
    return {"failed": "Corrected: failed", "cancelled": "Corrected: cancelled"}.get(
        each.outcome, "Written off: too late"
    )


def _content(found: RequestStory) -> RequestDetailContent | None:
    kept = found.content
    if kept is None:
        return None
    try:
        body = json.dumps(json.loads(kept.body), indent=2, ensure_ascii=False)
    except ValueError:
        body = kept.body
    return RequestDetailContent(body, tuple(kept.answers), kept.truncated)


def _replays(found: RequestStory) -> list[RequestRecord]:
    return [each for each in found.others if each.replay_of == found.request_id]


def _replay(visit: PageContext, found: RequestStory) -> str:
    """Where it can be asked again; its prompt goes along where that is kept."""
    url = visit.link("playground") if visit.may(Permission.KEYS_READ) else ""
    if not url or found.record is None or found.record.endpoint == "embeddings":
        return ""
    given = {"request": found.request_id} if found.content is not None else {"model": found.record.requested_model}
    return f"{url}?{urlencode(given)}"


def _amount(amount: int, unit: str) -> str:
    if unit == "money":
        return Money.nano(amount).text
    return f"{exact(amount)} {unit}".strip()
