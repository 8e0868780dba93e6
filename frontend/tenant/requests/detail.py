"""One request: limits, routing, executions and the calculation of its cost."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.utils.http import urlencode
from django.utils.translation import gettext as _

from billing.models import Adjustment, UsageEvent
from billing.rates.pricing import Component
from frontend.core.backend_messages import translate_message
from frontend.core.code_labels import code_text
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money, duration, exact, exact_places, share
from frontend.core.page_context import PageContext
from frontend.tenant.keys.key_limits import NAMES
from frontend.tenant.requests.log import CACHE_LABELS, SCOPES, bound_text, status_text
from frontend.tenant.requests.messages import curl_of, indented_body, messages_of
from frontend.tenant.requests.timeline import events_of, timeline_of
from inference_worker.contract.request import PROMPT_CLASSES, TOKEN_CLASSES
from inference_worker.contract.sampling_defaults import format_sampling_defaults
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
from millrace.apps.request_log.request_budgets import HeldFrom
from millrace.apps.request_log.selectors import RequestExecution, RequestStory
from tenants.models import ApiKey, Project
from tenants.permissions import Permission

BY = {
    "prefix": _lazy("prefix cached"),
    "spill": _lazy("prefix replica overloaded"),
    "load": _lazy("least busy"),
}
MISSES = {
    "too_short": _lazy("prompt shorter than one cache block"),
    "first_use": _lazy("new prefix"),
    "expired_or_evicted": _lazy("expired or evicted"),
    "other_worker": _lazy("cached on another replica or before a restart"),
    "prefix_changed": _lazy("prefix changed"),
}
SOURCES = {
    "upstream": _lazy("Tokens as counted by the provider"),
    "estimated": _lazy("Tokens estimated, because the provider sent no final count"),
}
ADJUSTMENTS = {
    "failed": _lazy("Corrected: failed"),
    "cancelled": _lazy("Corrected: cancelled"),
    "reconciled": _lazy("Corrected: the provider counted fewer tokens"),
}
PERIODS = {"day": _lazy("per day"), "month": _lazy("per month"), "lifetime": _lazy("in total")}
WRITE_DELAY = timedelta(minutes=1)  # records and usage are written in bulk, some seconds after a request's end


Fact = tuple[str, str, bool]  # label, value, and whether the value is shown in a monospaced font


def request_detail(ctx: PageContext, request_id: str) -> dict[str, Any] | None:
    """Return the details of a request; None if the tenant has no such request."""
    found = selectors.story(ctx.tenant.pk, request_id[:64])
    if found is None:
        return None
    record, first = found.record, found.executions[0].event if found.executions else None
    code, bound = (record.code, record.limited_by) if record else ("", None)
    return {
        "story": found,
        "record": record,
        "at": record.started_at if record else found.executions[0].event.admitted_at,
        "outcome": record.outcome if record else str(getattr(first, "outcome", RequestOutcome.COMPLETED)),
        "why_not": status_text(code, bound),  # the limit or error; empty for an answered request
        "bound": _bound(bound) if bound else [],
        "facts": _facts(ctx, record, first),
        "limits": _limits(record) if record else [],
        "budgets": _budgets(found),
        "route": _route(record) if record else [],
        "skipped": [(entry["model"], code_text(entry["reason"])) for entry in _read_skipped(record)],
        "places": [_place(placement) for placement in record.placements] if record else [],
        "executions": [_execution(execution) for execution in found.executions],
        "ran": bool(found.executions or (record and record.placements)),  # usage is settled or will be
        "content": _content(found),
        "stored_messages": messages_of(found.content),
        "curl": curl_of(record, found.content) if record else "",
        "timeline": timeline_of(found),
        "events": events_of(found),
        "replays": [replay for replay in found.others if replay.replay_of == found.request_id],
        "replay_url": _replay(ctx, found),
        "writing": _writing(ctx, found),  # records may still arrive
    }


def _writing(ctx: PageContext, found: RequestStory) -> bool:
    if found.record is None:
        return ctx.now - max(execution.event.settled_at for execution in found.executions) < WRITE_DELAY
    ran_on = not found.executions and bool(found.record.placements)
    return ran_on and ctx.now - found.record.started_at < WRITE_DELAY


def _bound(bound: Mapping[str, Any]) -> list[tuple[str, str]]:
    unit = str(bound.get("unit", ""))
    facts = [(_("Limit or budget"), bound_text(bound))]
    for name, label in (("limit", _("Limit")), ("left", _("Left")), ("needed", _("Needed"))):
        if name in bound:
            facts.append((label, _amount(int(bound[name]), unit)))
    if bound.get("reset_ms"):
        facts.append((_("Retry after"), duration(int(bound["reset_ms"]) * 1000)))
    if bound.get("resets_at"):
        facts.append((_("Resets at"), str(bound["resets_at"])[:16].replace("T", " ") + " UTC"))
    return facts


def _facts(ctx: PageContext, record: RequestRecord | None, first: UsageEvent | None) -> list[Fact]:
    source = record or first
    if source is None:
        return []
    key = ApiKey.objects.for_tenant(ctx.tenant).filter(pk=source.key_id).values_list("name", flat=True).first()
    project = Project.objects.for_tenant(ctx.tenant).filter(pk=source.project_id).values_list("name", flat=True).first()
    facts: list[Fact] = [
        (_("Key"), key or _("Key %(key_id)s, deleted") % {"key_id": source.key_id}, False),
        (_("Project"), project or _("Project %(project_id)s, deleted") % {"project_id": source.project_id}, False),
    ]
    if record is not None:
        facts += [(_("Endpoint"), record.endpoint + (", streamed" if record.stream else ""), False)]
        facts += [(_("Requested model"), record.requested_model or "–", True)]
        if served := selectors.served_model(record):
            facts.append((_("Served model"), served, True))
        if record.cache_layer:
            facts.append((_("Cache layer"), CACHE_LABELS.get(record.cache_layer, record.cache_layer), False))
        if record.ttft_ms is not None:
            facts.append((_("Time to first token"), duration(record.ttft_ms * 1000), False))
        facts.append((_("Total latency (client)"), duration(record.total_ms * 1000), False))
        if record.prompt_tokens is not None:
            facts.append(
                (_("Prompt"), _("%(prompt_tokens)s tokens") % {"prompt_tokens": exact(record.prompt_tokens)}, False)
            )
        if record.max_tokens is not None:
            facts.append(("max_tokens", _("%(max_tokens)s tokens") % {"max_tokens": exact(record.max_tokens)}, False))
        if record.batch_id is not None:
            facts.append((_("Batch line"), exact((record.batch_line or 0) + 1), False))
        facts.append((_("Gateway"), record.gateway_id, True))
    return facts


def _limits(record: RequestRecord) -> list[dict[str, Any]]:
    """Return the checked limits, with the one that rejected the request also if it was not recorded among them."""
    bound = record.limited_by or {}
    rows = [_limit(check) for check in record.limits]
    if bound.get("kind") == "limit" and not any(row["kind"] == "bad" for row in rows):
        numbers = {"limit": bound.get("limit", 0), "left": bound.get("left", 0), "cost": bound.get("needed", 0)}
        rows.append(_limit({"name": "", "scope": "", **bound, **numbers, "refused": True}))
    return rows


def _budgets(found: RequestStory) -> list[dict[str, Any]]:
    """Return the budgets that the request had to fit, the one that rejected it last."""
    rejecting = found.rejecting_budget
    passed = [budget for budget in found.budgets if rejecting is None or budget.budget_id != rejecting.budget_id]
    rows = [_budget(budget) | {"result": _("Passed"), "kind": "good"} for budget in passed]
    return rows + ([_budget(rejecting) | {"result": _("Rejected"), "kind": "bad"}] if rejecting else [])


def _budget(budget: HeldFrom) -> dict[str, Any]:
    """Return a budget with its present limit, and the part of it that is a temporary increase."""
    raised = _amount(budget.temporary_increase, budget.unit) if budget.temporary_increase else ""
    return {
        "budget": budget,
        "scope": SCOPES.get(budget.scope, budget.scope),
        "period": PERIODS.get(budget.period, budget.period),
        "limit": _amount(budget.limit, budget.unit),
        "raised": raised,
    }


def _limit(check: Mapping[str, Any]) -> dict[str, Any]:
    refused, dry = check.get("refused", False), check.get("dry", False)
    return {
        "name": NAMES.get(check["name"], check["name"]),
        "of": str(SCOPES.get(check["scope"], check["scope"])) + (f", {check['model']}" if check.get("model") else ""),
        "limit": check["limit"],
        "left": check["left"],
        "cost": check.get("cost", 0),
        "result": (_("Would have been rejected") if dry else _("Rejected"))
        if refused
        else _("Passed (dry run)")
        if dry
        else _("Passed"),
        "kind": ("warn" if dry else "bad") if refused else "good",
    }


def _route(record: RequestRecord) -> list[Fact]:
    route = record.route
    policy = route.get("policy")
    if policy is None:
        return [(_("Policy"), _("None (model requested by name)"), False), *_answer_cache(route)]
    name = f": {policy['rule_name']}" if policy.get("rule_name") else ""
    facts: list[Fact] = [
        (
            _("Policy"),
            _("%(requested_model)s, version %(version)s")
            % {"requested_model": record.requested_model, "version": policy["version"]},
            False,
        ),
        (_("Rule"), _("%(rule)s%(name)s (first match)") % {"rule": policy["rule"] + 1, "name": name}, False),
        (_("Targets in order"), ", ".join(route.get("targets", ())), True),
    ]
    return facts + _choice(policy) + _changes(route) + _answer_cache(route)


def _choice(policy: Mapping[str, Any]) -> list[Fact]:
    """Return what the first target was chosen by."""
    if "strategy" not in policy:
        return [(_("Drawn by weight"), exact(int(policy.get("draw", 0))), False)]
    facts: list[Fact] = [(_("Strategy"), code_text(str(policy["strategy"])), False)]
    for name, label in (("cost_nano", _("Estimated cost")), ("ttft_ms", _("Time to first token")), ("load", _("Load"))):
        for model, value in policy.get(name, {}).items():
            facts.append((f"{label}, {model}", _measure(name, value), False))
    if policy.get("probe"):
        facts.append((_("Probe"), _("Another target is faster. This request measures this one."), False))
    return facts


def _measure(name: str, value: float) -> str:
    if name == "cost_nano":
        return Money.nano(int(value)).text
    return (
        duration(round(value * 1000))
        if name == "ttft_ms"
        else _("%(load)s requests per slot") % {"load": f"{value:.2f}"}
    )


def _changes(route: Mapping[str, Any]) -> list[Fact]:
    """Return the escalations and what was left out."""
    facts: list[Fact] = [
        (
            _("Escalated from %(model)s") % {"model": each["model"]},
            _("Answer failed the check %(check)s") % {"check": code_text(str(each["check"]))},
            False,
        )
        for each in route.get("escalations", ())
    ]
    if reason := route.get("not_escalating"):
        facts.append((_("No escalation"), code_text(str(reason)), False))
    if defaults := route.get("sampling_defaults"):
        facts.append((_("Sampling defaults"), format_sampling_defaults(tuple(defaults.items())), False))
    if dropped := route.get("dropped_messages"):
        facts.append((_("Dropped messages"), exact(int(dropped)), False))
    if truncated := route.get("truncated_inputs"):
        facts.append((_("Truncated inputs"), exact(int(truncated)), False))
    if shadow := route.get("shadow"):
        reason = code_text(str(route.get("not_shadowing", "")))
        text = _("%(model)s (no answer: %(reason)s)") if reason else "%(model)s"
        facts.append((_("Shadow"), text % {"model": shadow["model"], "reason": reason}, False))
    elif reason := route.get("not_shadowing"):
        facts.append((_("No shadow"), code_text(str(reason)), False))
    if route.get("retry_budget"):
        facts.append((_("Retry budget"), str(route["retry_budget"]), False))
    return facts


def _answer_cache(route: Mapping[str, Any]) -> list[Fact]:
    """Return the result of the answer cache."""
    note = route.get("answer_cache")
    if not note:
        return []
    result = _("miss (%(reason)s)") % {"reason": code_text(str(note.get("miss", "")))}
    facts = [(_("Answer cache"), code_text(str(note["layer"])) if note.get("layer") else result, False)]
    similar = note if note.get("layer") == "semantic" else note.get("semantic") or {}
    if reason := similar.get("miss"):
        reasons = ", ".join(map(code_text, (reason, *similar.get("guards", ()))))
        facts.append((_("Similar question"), _("not served (%(reasons)s)") % {"reasons": reasons}, False))
    if "similarity" in similar:
        facts.append(
            (
                _("Similarity"),
                _("%(similarity)s, margin %(margin)s")
                % {"similarity": f"{similar['similarity']:.4f}", "margin": f"{similar['margin']:.4f}"},
                False,
            )
        )
    if similar.get("request_id"):
        facts.append((_("Matched request"), str(similar["request_id"]), True))
    return facts


def _read_skipped(record: RequestRecord | None) -> list[dict[str, str]]:
    return [] if record is None else list(record.route.get("skipped", ()))


def _place(placement: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "replica": placement["replica"],
        "execution": int(placement["execution"]) + 1,
        "attempt": int(placement["attempt"]),
        "reason": BY.get(str(placement["by"]), str(placement["by"])),
        "queued_ms": int(placement.get("queued_ms", 0)),
        "load": int(placement.get("load", 0)),
    }


def _execution(execution: RequestExecution) -> dict[str, Any]:
    """Return an execution with the parts of its duration and the calculation of its cost."""
    event = execution.event
    lines = [
        (_component_label(line.component), line.tokens, Money.nano(line.nano_per_million), Money(line.femto))
        for line in execution.lines
    ]
    adjustments = [
        (_place_reason(adjustment), adjustment.created_at, Money(int(adjustment.cost_femto)))
        for adjustment in execution.adjustments
    ]
    tokens = [(_component_label(name), getattr(event, name)) for name in TOKEN_CLASSES]
    if event.host_tokens:
        tokens.append((_("of the cache reads, from CPU memory"), event.host_tokens))
    if event.reasoning_tokens:
        tokens.append((_("of that, reasoning"), event.reasoning_tokens))
    if event.accepted_drafts or event.rejected_drafts:
        tokens.append((_("of that, accepted drafts"), event.accepted_drafts))
        tokens.append((_("Rejected drafts, not billed"), event.rejected_drafts))
    if event.unbilled_tokens:
        tokens.append((_("Not charged, above the reservation"), event.unbilled_tokens))
    cost = Money(int(event.cost_femto) + sum(cost.femto for *_reason, cost in adjustments))
    return {
        "event": event,
        "number": event.execution + 1,
        "finish": code_text(event.finish_reason),
        "tokens": tokens,
        "source": SOURCES.get(event.usage_source, ""),
        "miss": _miss(event),
        "cache": _cache(event),
        "lines": lines,
        "adjustments": adjustments,
        "cost": cost,
        "price_places": exact_places(line[2] for line in lines),
        "cost_places": exact_places([*(line[3] for line in lines), *(row[2] for row in adjustments), cost]),
        "prices_from": sorted({line.effective_from for line in execution.lines}),
    }


def _component_label(name: str) -> str:
    return translate_message(Component(name).label)


def _cache(event: UsageEvent) -> dict[str, Any] | None:
    """Return what part of the input came from the prompt cache; None without input."""
    whole = sum(getattr(event, name) for name in PROMPT_CLASSES)
    if not whole or event.outcome == "failed":
        return None
    written = event.cache_write_5m + event.cache_write_1h
    return {"read": event.cache_read, "whole": whole, "share": share(event.cache_read, whole), "written": written}


def _miss(event: UsageEvent) -> str:
    text = MISSES.get(event.miss_reason) or code_text(event.miss_reason)
    if event.miss_reason == "prefix_changed" and event.changed_at is not None:
        return _("%(reason)s from token %(changed_at)s") % {"reason": text, "changed_at": exact(event.changed_at)}
    return text


def _place_reason(adjustment: Adjustment) -> str:
    return ADJUSTMENTS.get(adjustment.outcome, _("Written off: too late"))


def _content(found: RequestStory) -> dict[str, Any] | None:
    content = found.content
    if content is None:
        return None
    return {"body": indented_body(content), "answers": content.answers, "truncated": content.truncated}


def _replay(ctx: PageContext, found: RequestStory) -> str:
    """Return the URL of the playground with this request; its prompt is included if it is stored."""
    url = ctx.url("playground") if ctx.may(Permission.KEYS_READ) else ""
    if not url or found.record is None or found.record.endpoint in ("embeddings", "rerank", "score"):
        return ""
    context = {"request": found.request_id} if found.content is not None else {"model": found.record.requested_model}
    return f"{url}?{urlencode(context)}"


def _amount(amount: int, unit: str) -> str:
    if unit == "money":
        return Money.nano(amount).text
    return f"{exact(amount)} {unit}".strip()
