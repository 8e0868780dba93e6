"""Costs and savings of warmed prompts, recorded when their batches and the requests that used them are settled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial

from django.db import transaction
from django.db.models import Q, Sum

from billing.models import UsageChange
from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.answer_caches.warming_candidates import digest_history, stored_requests
from millrace.apps.batches.actions import LIVE, storage
from millrace.apps.batches.models import Batch, File
from millrace.apps.request_log.models import CacheLayer, RequestContent, RequestOutcome, RequestRecord
from tenants.isolation.scopes import tenant_scope
from tenants.models import Tenant

SETTLE_TIME = timedelta(minutes=10)  # after the end of a batch, its requests are settled
LATE = timedelta(hours=1)  # requests that used a prompt may be settled after it has expired


def settle_warmed(tenant: Tenant, *, now: datetime | None = None) -> None:
    """Digest new prompts, record costs and savings of the tenant's warmed prompts, and remove files of ended batches.

    Batches of a tenant that no longer permits warming are cancelled. Running this again, or concurrently, changes
    nothing.
    """
    now = now or datetime.now(UTC)
    digest_history(tenant.pk, now)
    with tenant_scope(tenant):
        rows = WarmedPrompt.objects.for_tenant(tenant)
        recent = list(rows.filter(Q(cost_femto=None) | Q(expires_at__gt=now - LATE)).order_by("id"))
        batches = Batch.objects.for_tenant(tenant).in_bulk({row.batch_id for row in recent})
        _read_requests(tenant, recent)
        _settle_costs(tenant, [row for row in recent if row.cost_femto is None], batches, now)
        _count_hits(tenant, recent)
        fields = ["request_id", "cost_femto", "hits", "saved_femto"]
        WarmedPrompt.objects.for_tenant(tenant).bulk_update(recent, fields)
        _remove_copies(tenant, recent, batches.values())
        if not permits_warming(tenant):
            live = (Batch.Status.VALIDATING, Batch.Status.IN_PROGRESS)
            Batch.objects.for_tenant(tenant).filter(pk__in=batches, status__in=live).update(
                status=Batch.Status.CANCELLING, cancelling_at=now
            )


def permits_warming(tenant: Tenant) -> bool:
    """Return whether the tenant has opted in to cache warming, stores prompts and is served."""
    return bool(tenant.cache_warming_nano and tenant.content_retention_days and not tenant.is_suspended)


def _read_requests(tenant: Tenant, rows: Sequence[WarmedPrompt]) -> None:
    """Set the request of each prompt that has run."""
    waiting = {(row.batch_id, row.batch_line): row for row in rows if not row.request_id}
    if not waiting:
        return
    records = RequestRecord.objects.for_tenant(tenant).filter(
        batch_id__in={batch_id for batch_id, _ in waiting},
        started_at__gte=min(row.created_at for row in waiting.values()),
    )
    # Of a line that ran again, the last request counts.
    for record in records.order_by("started_at"):
        row = waiting.get((record.batch_id or 0, record.batch_line or 0))
        if row is not None:
            row.request_id = record.request_id


def _settle_costs(tenant: Tenant, rows: Sequence[WarmedPrompt], batches: Mapping[int, Batch], now: datetime) -> None:
    """Set the cost of each prompt whose batch has ended.

    If a gateway was killed before it recorded a request, the prompt's cost is not known: its maximum counts.
    """
    costs = _sums(tenant, rows, "cost_femto")
    ended = [row for row in rows if (batch := batches.get(row.batch_id)) is None or batch.status not in LIVE]
    requests: dict[int, int] = defaultdict(int)
    for row in ended:
        requests[row.batch_id] += bool(row.request_id)
    for row in ended:
        batch = batches.get(row.batch_id)
        ran = None if batch is None else batch.succeeded + batch.errored
        if row.request_id:
            if row.request_id in costs:
                row.cost_femto = costs[row.request_id]
            elif _end_of(batch, row) < now - SETTLE_TIME:
                row.cost_femto = 0  # it failed
        elif ran is not None and requests[row.batch_id] >= ran:
            row.cost_femto = 0  # it was not run
        elif _end_of(batch, row) < now - SETTLE_TIME:
            row.cost_femto = row.max_femto


def _end_of(batch: Batch | None, row: WarmedPrompt) -> datetime:
    ends = () if batch is None else (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    return next((end for end in ends if end is not None), row.created_at)


def _sums(tenant: Tenant, rows: Iterable[WarmedPrompt], column: str) -> dict[str, int]:
    """Return a sum of the usage of each prompt's request, with that of its vectors."""
    names = {row.request_id: row for row in rows if row.request_id}
    if not names:
        return {}
    ids = [f"{name}{suffix}" for name in names for suffix in ("", ".q", ".a")]
    since = min(row.created_at for row in names.values())
    changes = UsageChange.objects.for_tenant(tenant).filter(request_id__in=ids, admitted_at__gte=since)
    found: dict[str, int] = defaultdict(int)
    settled = set()
    for request_id, amount in changes.values_list("request_id").annotate(sum=Sum(column)):
        name = request_id.partition(".")[0]
        found[name] += int(amount)
        settled.add(request_id)
    return {name: amount for name, amount in found.items() if name in settled}


def _count_hits(tenant: Tenant, rows: Sequence[WarmedPrompt]) -> None:
    """Set the number of requests that used each prompt, and the saving of the first one."""
    answers = {row.request_id: row for row in rows if row.request_id and row.cache == WarmedPrompt.Cache.ANSWER}
    uses: list[tuple[WarmedPrompt, list[str]]] = []
    if answers:
        hits: dict[str, list[str]] = defaultdict(list)
        records = RequestRecord.objects.for_tenant(tenant).filter(
            started_at__gte=min(row.created_at for row in answers.values()),
            cache_layer__in=[CacheLayer.EXACT, CacheLayer.SEMANTIC],
            cache_source__in=answers,
            outcome=RequestOutcome.COMPLETED,
        )
        for source, request_id in records.order_by("started_at").values_list("cache_source", "request_id"):
            hits[source].append(request_id)
        uses += [(answers[source], ids) for source, ids in hits.items()]
    prefixes = [row for row in rows if row.request_id and row.cache == WarmedPrompt.Cache.PREFIX]
    uses += _prefix_requests(tenant, prefixes)
    usage = _usage_of(tenant, [ids[0] for _, ids in uses], rows)
    for row, ids in uses:
        first = usage.get(ids[0])
        if first is None:
            continue
        read, saved = first
        if row.cache == WarmedPrompt.Cache.ANSWER:
            row.hits, row.saved_femto = len(ids), saved
        elif read * 2 >= row.prefix_tokens:  # otherwise the blocks were evicted, and the first request filled the cache
            row.hits, row.saved_femto = len(ids), saved * min(read, row.prefix_tokens) // max(1, read)


def _prefix_requests(tenant: Tenant, rows: Sequence[WarmedPrompt]) -> list[tuple[WarmedPrompt, list[str]]]:
    """Return the later requests with each warmed prefix, oldest first."""
    found: dict[int, list[str]] = defaultdict(list)
    by_fingerprint: dict[bytes, list[WarmedPrompt]] = defaultdict(list)
    for row in rows:
        by_fingerprint[bytes(row.fingerprint)].append(row)
    if not rows:
        return []
    for request, digests in stored_requests(tenant.pk, min(row.created_at for row in rows)):
        for prefix in digests.prefixes:
            for row in by_fingerprint.get(prefix.fingerprint, ()):
                if row.created_at <= request.started_at < row.expires_at:
                    found[row.pk].append(request.request_id)
    return [(row, found[row.pk][::-1]) for row in rows if row.pk in found]


def _usage_of(tenant: Tenant, request_ids: Sequence[str], rows: Sequence[WarmedPrompt]) -> dict[str, tuple[int, int]]:
    """Return the tokens that each settled request read from the prefix cache, and what its caches saved."""
    if not request_ids:
        return {}
    since = min(row.created_at for row in rows)
    changes = UsageChange.objects.for_tenant(tenant).filter(request_id__in=request_ids, admitted_at__gte=since)
    sums = changes.values_list("request_id").annotate(read=Sum("cache_read"), saved=Sum("saved_femto"))
    return {request_id: (int(read), int(saved)) for request_id, read, saved in sums}


def _remove_copies(tenant: Tenant, rows: Sequence[WarmedPrompt], batches: Iterable[Batch]) -> None:
    """Remove the copies of stored prompts that warming has made, so that they are not stored longer."""
    request_ids = [row.request_id for row in rows if row.request_id]
    RequestContent.objects.for_tenant(tenant).filter(request_id__in=request_ids).delete()
    ended = [batch for batch in batches if batch.status not in LIVE]
    names = {name for batch in ended for name in (batch.input_file, batch.output_file, batch.error_file) if name}
    files = File.objects.for_tenant(tenant).filter(name__in=names)
    removed = list(files.values_list("name", flat=True))
    files.delete()
    for name in removed:
        transaction.on_commit(partial(storage().remove, name))
