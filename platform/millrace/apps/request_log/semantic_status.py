"""The semantic cache of a tenant: its evidence, the bound of its error rate, and the reasons of cache misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import connection
from django.db.models import F

from millrace.apps.request_log.cache_layers import CacheLayers
from millrace.apps.request_log.models import SemanticEntry, SemanticEvidence
from millrace.apps.request_log.semantic_decision import BAND_STARTS, Band, Evidence
from tenants.models import Tenant

# A lookup that was guarded, or whose margin is too small, has its reason in `semantic`.
_MISSES = """
SELECT coalesce(nullif('semantic_' || (route #>> '{answer_cache,semantic,miss}'), 'semantic_'),
    route #>> '{answer_cache,miss}') AS reason, count(*)
FROM request_log_requestrecord
WHERE tenant_id = %(tenant)s AND started_at >= %(start)s AND started_at < %(end)s
    AND route #>> '{answer_cache,miss}' IS NOT NULL
GROUP BY 1 ORDER BY 2 DESC, 1
"""


@dataclass(frozen=True)
class BandStatus:
    """The checks of one band of margins."""

    margin_from: float
    correct: int
    wrong: int
    error_rate: float | None
    upper_bound: float
    missing_checks: int  # correct checks until the band is served
    is_served: bool


@dataclass(frozen=True)
class MissCount:
    """The number of requests that the answer cache did not serve for one reason."""

    reason: str
    requests: int


@dataclass(frozen=True)
class SemanticStatus:
    """The state of a tenant's semantic cache."""

    max_error_percent: int
    questions: int
    bands: Sequence[BandStatus]
    error_rate: float | None  # of the checks in the served bands
    upper_bound: float | None  # of the error rate of hits; None: no band is served
    missing_checks: int  # correct checks until the first band is served


@dataclass(frozen=True)
class AnswerCacheReport(CacheLayers):
    """The cache layers of a period, with their misses and the state of the semantic cache."""

    misses: Sequence[MissCount]
    semantic: SemanticStatus


def semantic_status(tenant: Tenant) -> SemanticStatus:
    """Return the state of the tenant's semantic cache. Its scope must be open.

    The evidence is that of the embedding deployment that was used last.
    """
    rows = list(SemanticEvidence.objects.for_tenant(tenant).order_by(F("updated_at").desc()))
    evidence = Evidence()
    for row in rows:
        if row.embedding == rows[0].embedding and row.band < len(BAND_STARTS):
            evidence.bands[row.band] = Band(row.correct, row.wrong)
    max_error = tenant.semantic_cache_max_error_percent / 100
    served = evidence.served_bands(max_error) if max_error else []
    checked = Band(
        sum(evidence.bands[number].correct for number in served), sum(evidence.bands[number].wrong for number in served)
    )
    return SemanticStatus(
        max_error_percent=tenant.semantic_cache_max_error_percent,
        questions=SemanticEntry.objects.for_tenant(tenant).count(),
        bands=[
            BandStatus(
                start,
                band.correct,
                band.wrong,
                _error_rate(band),
                band.bound,
                band.missing(max_error) if max_error else 0,
                number in served,
            )
            for number, (start, band) in enumerate(zip(BAND_STARTS, evidence.bands, strict=True))
        ],
        error_rate=_error_rate(checked),
        upper_bound=evidence.bound(max_error) if max_error else None,
        missing_checks=evidence.missing(max_error) if max_error else 0,
    )


def cache_misses(tenant_id: int, start: datetime, end: datetime) -> list[MissCount]:
    """Return why requests were not served from the answer cache, most frequent first. The scope must be open."""
    with connection.cursor() as cursor:
        cursor.execute(_MISSES, {"tenant": tenant_id, "start": start, "end": end})
        return [MissCount(reason, int(count)) for reason, count in cursor.fetchall()]


def _error_rate(band: Band) -> float | None:
    checks = band.correct + band.wrong
    return band.wrong / checks if checks else None
