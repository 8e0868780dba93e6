"""The timeline of one request in three scales: the whole request, until the first token, and per output token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.utils.translation import gettext as _

from frontend.core.gauges import percent
from frontend.core.numbers import Money, duration, exact
from millrace.apps.request_log.models import RequestRecord
from millrace.apps.request_log.selectors import RequestExecution, RequestStory

_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class TimelineSpan:
    """A part of the request's time, in microseconds since it was received. `kind` selects its color."""

    label: str
    kind: str  # wait, prefill, decode or lost
    start: int
    end: int
    scale: int = 1  # microseconds of the drawing

    @property
    def x(self) -> str:
        return percent(self.start, self.scale)

    @property
    def width(self) -> str:
        return percent(max(self.end - self.start, 0), self.scale)

    @property
    def length(self) -> str:
        return duration(max(self.end - self.start, 0))


@dataclass(frozen=True)
class RequestTimeline:
    """`whole` and `first` are the spans in two scales. `speed` and `per_token` are averages; empty without decoding."""

    total: str
    whole: Sequence[TimelineSpan]
    first_token: str
    first: Sequence[TimelineSpan]
    decode: str
    tokens: str
    speed: str
    per_token: str
    label: str


def timeline_of(story: RequestStory) -> RequestTimeline | None:
    """Return the timeline; None if the request was not run."""
    if not story.executions:
        return None
    record = story.record
    spans = _spans(story)
    total = max(record.total_ms * 1000 if record else 0, *(span.end for span in spans), 1)
    firsts = [span.end for span in spans if span.kind == "prefill"]
    first = (record.ttft_ms * 1000 if record and record.ttft_ms else 0) or (min(firsts) if firsts else total)
    early = [span for span in spans if span.start < first and span.kind != "decode"]
    last = story.executions[-1]
    tokens, decode = last.event.output, last.decode_us
    has_speed = tokens > 1 and decode > 0
    parts = ", ".join(f"{span.label} {span.length}" for span in spans)
    return RequestTimeline(
        total=duration(total),
        whole=_scale(spans, total),
        first_token=duration(first),
        first=_scale(early, max(first, *(span.end for span in early), 1)) if early else (),
        decode=duration(decode),
        tokens=exact(tokens),
        speed=_tenths((tokens - 1) * 10_000_000 // decode) if has_speed else "",
        per_token=f"{_tenths(decode // (tokens - 1) // 100)} ms" if has_speed else "",
        label=_("Timeline of %(total)s: %(parts)s") % {"total": duration(total), "parts": parts},
    )


def _spans(story: RequestStory) -> list[TimelineSpan]:
    record = story.record
    began = record.started_at if record else story.executions[0].event.admitted_at
    queued = _sum_queue_times(record)
    found: list[TimelineSpan] = []
    for execution in story.executions:
        event = execution.event
        at = max(0, (event.admitted_at - began) // _MICROSECOND)
        if not found and at:
            found.append(TimelineSpan(_("Admission"), "wait", 0, at))
        number = f" {event.execution + 1}" if len(story.executions) > 1 else ""
        wait = at + queued[event.execution]
        if wait > at:
            found.append(TimelineSpan(_("Gateway queue") + number, "wait", at, wait))
        found += _execution_spans(execution, number, wait)
    return found


def _execution_spans(execution: RequestExecution, number: str, at: int) -> list[TimelineSpan]:
    event = execution.event
    if event.outcome == "failed":
        return [TimelineSpan(_("Failed execution") + number, "lost", at, at + event.duration_us)]
    queue = at + event.queue_us
    prefill = queue + execution.prefill_us
    return [
        TimelineSpan(_("Engine queue") + number, "wait", at, queue),
        TimelineSpan(_("Prefill") + number, "prefill", queue, prefill),
        TimelineSpan(_("Decode") + number, "decode", prefill, prefill + execution.decode_us),
    ]


def _sum_queue_times(record: RequestRecord | None) -> Mapping[int, int]:
    """Return the microseconds that each execution waited in the gateway's queue."""
    waits: defaultdict[int, int] = defaultdict(int)
    for placement in record.placements if record else ():
        waits[int(placement["execution"])] += int(placement.get("queued_ms", 0)) * 1000
    return waits


def _scale(spans: Sequence[TimelineSpan], scale: int) -> list[TimelineSpan]:
    return [TimelineSpan(span.label, span.kind, span.start, span.end, scale) for span in spans]


def _tenths(value: int) -> str:
    return f"{exact(value // 10)}.{value % 10}"


def events_of(story: RequestStory) -> list[tuple[str, str, str]]:
    """Return the steps of a request in order: time since it was received (empty: not recorded), name and details."""
    record = story.record
    if record is None:
        return []
    found = [("+0 ms", "request.received", _("gateway %(gateway_id)s") % {"gateway_id": record.gateway_id})]
    if record.limits:
        refused = sum(bool(check.get("refused")) and not check.get("dry") for check in record.limits)
        name = "limits.rejected" if refused else "limits.passed"
        found.append(
            (
                "",
                name,
                _("%(passed)s of %(number)s")
                % {"passed": exact(len(record.limits) - refused), "number": exact(len(record.limits))},
            )
        )
    if story.rejecting_budget is not None or record.code in ("budget_exceeded", "quota_exceeded"):
        found.append(("", "budget.rejected", str((record.limited_by or {}).get("name", ""))))
    elif story.reserved_nano is not None:
        found.append(("", "budget.reserved", Money.nano(story.reserved_nano).text))
    found += [_describe_placement(placement) for placement in record.placements]
    if record.ttft_ms is not None:
        found.append((f"+{exact(record.ttft_ms)} ms", "token.first", ""))
    ended = "completed" if record.outcome == "completed" else str(record.outcome)
    found.append(
        (
            f"+{exact(record.total_ms)} ms",
            f"request.{ended}",
            record.code or _("status %(status)s") % {"status": record.status},
        )
    )
    for execution in story.executions:
        event = execution.event
        settled = max(0, (event.settled_at - record.started_at) // timedelta(milliseconds=1))
        cost = Money(int(event.cost_femto)).exact_text
        found.append(
            (
                f"+{exact(settled)} ms",
                "usage.settled",
                _("execution %(execution)s, %(cost)s") % {"execution": event.execution + 1, "cost": cost},
            )
        )
    return found


def _describe_placement(placement: Mapping[str, Any]) -> tuple[str, str, str]:
    attempt = int(placement["attempt"])
    name = "route.selected" if attempt == 1 and not placement["execution"] else "route.retried"
    return (
        "",
        name,
        _("%(replica)s, execution %(execution)s, attempt %(attempt)s")
        % {"replica": placement["replica"], "execution": int(placement["execution"]) + 1, "attempt": attempt},
    )
