"""Counting of observations: each request changes the sums of its unit and arm once, exactly.

An observation stores what it has contributed. If it is counted again, because feedback, usage or a retry came later,
the sums change by the difference. The experiment's row is locked meanwhile, so two counts never run concurrently. The
sums are integers, so their order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from inference_worker.contract.request import PROMPT_CLASSES
from millrace.apps.experiments.metrics import LOG_SCALE
from millrace.apps.experiments.models import ArmTotal, Observation, UnitTotal
from millrace.apps.experiments.statistics import Moments
from millrace.apps.experiments.success import ended_at, feedback_of, find_retried, has_succeeded, retried_by
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
from millrace.apps.request_log.selectors import Usage, usages
from tenants.isolation.scopes import tenant_scope
from tenants.models import Experiment

BATCH_SIZE = 1_000
USAGE_RETRY = timedelta(seconds=60)
USAGE_LATEST = timedelta(hours=1)  # after the end of a request; later usage is not counted
REQUESTS = "requests"

Pair = tuple[int, int]  # a count and a sum
Contribution = Mapping[str, Pair]


def count_due(experiment: Experiment, now: datetime) -> int:
    """Count a batch of the experiment's due observations. Returns their number."""
    tenant_id = experiment.tenant_id
    with tenant_scope(tenant_id):
        locked = Experiment.objects.for_tenant(tenant_id).select_for_update().filter(pk=experiment.pk).first()
        rows = Observation.objects.for_tenant(tenant_id).filter(experiment_id=experiment.pk, due_at__lte=now)
        due = list(rows.select_for_update().order_by("due_at")[:BATCH_SIZE]) if locked is not None else []
        if due:
            _count(tenant_id, experiment.pk, due, now)
        return len(due)


def _count(tenant_id: int, experiment_id: int, due: Sequence[Observation], now: datetime) -> None:
    ids = [observation.request_id for observation in due]
    starts = [observation.started_at for observation in due]
    found = RequestRecord.objects.for_tenant(tenant_id).filter(
        request_id__in=ids, started_at__range=(min(starts), max(starts))
    )
    records = {record.request_id: record for record in found.order_by("-started_at")}  # the first one is kept
    rows = list(records.values())
    usage, feedback, again = usages(rows), feedback_of(tenant_id, ids), find_retried(tenant_id, rows)
    changes: list[tuple[Observation, Contribution, Contribution]] = []
    for observation in due:
        observation.due_at = None
        record = records.get(observation.request_id)
        if record is None:  # its retention is over; what was counted stays
            continue
        success = has_succeeded(record, feedback.get(record.request_id), was_retried=record.request_id in again)
        new = contribution(record, usage.get(record.request_id), success)
        if _lacks_usage(record, usage) and now < ended_at(record) + USAGE_LATEST:
            observation.due_at = now + USAGE_RETRY
        changes.append((observation, _pairs(observation.counted), new))
        observation.counted = new
    _apply(tenant_id, experiment_id, changes)
    Observation.objects.for_tenant(tenant_id).bulk_update(due, ["due_at", "counted"])
    earlier = set(retried_by(tenant_id, [record for record in rows])) - {row.request_id for row in due if row.due_at}
    renewed = Observation.objects.for_tenant(tenant_id).filter(request_id__in=earlier, due_at__isnull=True)
    stale = [row.pk for row in renewed.exclude(request_id__in=ids) if _pairs(row.counted).get("success", (0, 0))[1]]
    Observation.objects.for_tenant(tenant_id).filter(pk__in=stale).update(due_at=now)


def contribution(record: RequestRecord, usage: Usage | None, success: bool | None) -> dict[str, Pair]:
    """Return what a request adds to the sums of its unit: of each metric a count and a sum."""
    found: dict[str, Pair] = {REQUESTS: (1, 1)}
    if record.outcome == RequestOutcome.LIMITED:
        return found
    if success is not None:
        found["success"] = (1, int(success))
    if record.ttft_ms is not None:
        found["ttft"] = (1, _logarithm(record.ttft_ms))
    if record.itl_us is not None:
        found["itl"] = (1, _logarithm(record.itl_us))
    if usage is not None:
        found["cost"] = (1, usage.cost_femto)
        if prompt := sum(usage.tokens[name] for name in PROMPT_CLASSES):
            found["cache_hit"] = (prompt, usage.tokens["cache_read"])
    return found


def _logarithm(value: int) -> int:
    return round(math.log(max(1, value)) * LOG_SCALE)


def _lacks_usage(record: RequestRecord, usage: Mapping[str, Usage]) -> bool:
    return record.request_id not in usage and record.ttft_ms is not None


def _pairs(stored: Mapping[str, Sequence[int]] | None) -> dict[str, Pair]:
    return {name: (pair[0], pair[1]) for name, pair in (stored or {}).items()}


def _apply(
    tenant_id: int, experiment_id: int, changes: Sequence[tuple[Observation, Contribution, Contribution]]
) -> None:
    """Change the sums of the units and arms by the differences between old and new contributions."""
    stored = UnitTotal.objects.for_tenant(tenant_id).filter(
        experiment_id=experiment_id, unit__in={observation.unit for observation, _, _ in changes}
    )
    units = {(row.arm, row.unit): row for row in stored}
    arms = {row.arm: row for row in ArmTotal.objects.for_tenant(tenant_id).filter(experiment_id=experiment_id)}
    before = {key: _pairs(row.totals) for key, row in units.items()}
    after = {key: dict(pairs) for key, pairs in before.items()}
    for observation, old, new in changes:
        totals = after.setdefault((observation.arm, observation.unit), {})
        for name in {*old, *new}:
            (w, x), (v, y), (a, b) = old.get(name, (0, 0)), new.get(name, (0, 0)), totals.get(name, (0, 0))
            totals[name] = (a + v - w, b + y - x)
    for (arm, unit), totals in after.items():
        row = arms.setdefault(arm, ArmTotal(tenant_id=tenant_id, experiment_id=experiment_id, arm=arm, moments={}))
        was = before.get((arm, unit), {})
        for name, pair in totals.items():
            moments = Moments(*row.moments.get(name, ()))
            row.moments[name] = moments.replace_pair(was.get(name, (0, 0)), pair).as_list()
        unit_row = units.setdefault(
            (arm, unit), UnitTotal(tenant_id=tenant_id, experiment_id=experiment_id, arm=arm, unit=unit)
        )
        unit_row.totals = totals
    for row in arms.values():
        row.requests = Moments(*row.moments.get(REQUESTS, ())).x
    UnitTotal.objects.for_tenant(tenant_id).bulk_create(
        units.values(),
        update_conflicts=True,
        update_fields=["totals"],
        unique_fields=["tenant_id", "experiment_id", "arm", "unit"],
    )
    ArmTotal.objects.for_tenant(tenant_id).bulk_create(
        arms.values(),
        update_conflicts=True,
        update_fields=["requests", "moments"],
        unique_fields=["tenant_id", "experiment_id", "arm"],
    )
