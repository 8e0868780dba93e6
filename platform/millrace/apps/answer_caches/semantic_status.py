"""The semantic cache of a tenant: its evidence, the bound of its error rate, and the reasons of cache misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import F

from millrace.apps.answer_caches.cache_layers import CacheLayers
from millrace.apps.answer_caches.models import SemanticEntry, SemanticEvidence
from millrace.apps.answer_caches.semantic_decision import BAND_STARTS, Band, Evidence
from millrace.apps.request_log.request_rollups import request_sums
from tenants.models import Tenant


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
    error_rate: float | None  # share of wrong answers in the checks of the served bands
    upper_bound: float | None  # upper bound of the error rate of hits; None: no band is served
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
                band.count_missing(max_error) if max_error else 0,
                number in served,
            )
            for number, (start, band) in enumerate(zip(BAND_STARTS, evidence.bands, strict=True))
        ],
        error_rate=_error_rate(checked),
        upper_bound=evidence.bound(max_error) if max_error else None,
        missing_checks=evidence.count_missing(max_error) if max_error else 0,
    )


def cache_misses(tenant_id: int, start: datetime, end: datetime) -> list[MissCount]:
    """Return why requests were not served from the answer cache, most frequent first. The scope must be open."""
    rows = request_sums(tenant_id, start, end, ("answer_miss",), ("misses",)).items()
    found = [MissCount(reason, sums["misses"]) for (reason,), sums in rows if sums["misses"]]
    return sorted(found, key=lambda miss: (-miss.requests, miss.reason))


def _error_rate(band: Band) -> float | None:
    checks = band.correct + band.wrong
    return band.wrong / checks if checks else None
