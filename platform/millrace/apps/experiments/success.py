"""Success of requests: what counts as a completed task.

Feedback decides, if there is any: `success`, or a score of at least 0.5. Otherwise a request succeeded if it completed,
its answer has no failure (schema, tool call), and its end user did not send the same prompt again soon afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from millrace.apps.feedback.models import SubmittedFeedback
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
from millrace.apps.request_log.request_rollups import GOOD_SCORE, RETRY_SECONDS

RETRY_WINDOW = timedelta(seconds=RETRY_SECONDS)  # after the end of a request
MAX_DURATION = timedelta(hours=1)  # duration of a request that a retry refers to


def feedback_of(tenant_id: int, request_ids: Iterable[str]) -> dict[str, bool]:
    """Return the success that feedback reports, by request ID. Feedback with only a label reports none."""
    rows = SubmittedFeedback.objects.for_tenant(tenant_id).filter(request_id__in=list(request_ids))
    found = {}
    for request_id, success, score in rows.values_list("request_id", "success", "score"):
        if success is not None:
            found[request_id] = success
        elif score is not None:
            found[request_id] = score >= GOOD_SCORE
    return found


def find_retried(tenant_id: int, records: Sequence[RequestRecord]) -> set[str]:
    """Return the IDs of the requests whose prompt the same end user sent again soon after their end."""
    keys = {record.retry_key for record in records if record.retry_key is not None}
    if not keys:
        return set()
    starts = [record.started_at for record in records]
    span = (min(starts), max(map(ended_at, records)) + RETRY_WINDOW)
    later: dict[int, list[datetime]] = {}
    rows = RequestRecord.objects.for_tenant(tenant_id).filter(retry_key__in=keys, started_at__range=span)
    for key, at in rows.values_list("retry_key", "started_at"):
        if key is not None:
            later.setdefault(key, []).append(at)
    return {
        record.request_id
        for record in records
        if record.retry_key is not None
        and any(ended_at(record) <= at <= ended_at(record) + RETRY_WINDOW for at in later[record.retry_key])
    }


def retried_by(tenant_id: int, records: Sequence[RequestRecord]) -> list[str]:
    """Return the IDs of earlier requests that these may be retries of."""
    named = [record for record in records if record.retry_key is not None]
    if not named:
        return []
    starts = [record.started_at for record in named]
    span = (min(starts) - MAX_DURATION - RETRY_WINDOW, max(starts))
    keys = {record.retry_key for record in named}
    rows = RequestRecord.objects.for_tenant(tenant_id).filter(
        retry_key__in=keys, started_at__range=span, experiment_id__isnull=False
    )
    return list(rows.values_list("request_id", flat=True))


def has_succeeded(record: RequestRecord, feedback: bool | None, *, was_retried: bool) -> bool | None:
    """Return whether the request succeeded; None if a limit or budget rejected it, so that it was never tried."""
    if record.outcome == RequestOutcome.LIMITED:
        return None
    if feedback is not None:
        return feedback
    return record.outcome == RequestOutcome.COMPLETED and not record.failure and not was_retried


def ended_at(record: RequestRecord) -> datetime:
    return record.started_at + timedelta(milliseconds=record.total_ms)
