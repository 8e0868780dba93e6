"""Requests, tokens and savings of a tenant by cache layer.

Requests and layers are those of the request log, tokens and money those of the settled usage. A request whose usage is
not settled yet has no tokens. The time that an exact or semantic hit saved is the latency of the request whose answer
was returned minus its own. It is known while both records are in the request log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from django.db import connection

from millrace.apps.request_log.models import CacheLayer
from millrace.apps.request_log.request_rollups import request_sums

# Times are in no sum, because they depend on two records, which are removed independently.
_SAVED_MS = """
WITH hits AS (
    SELECT r.cache_layer, r.cache_source, r.total_ms FROM request_log_requestrecord r
    WHERE r.tenant_id = %(tenant)s AND r.started_at >= %(start)s AND r.started_at < %(end)s
        AND r.cache_layer IN ('exact', 'semantic')
        AND (r.batch_id IS NULL OR NOT EXISTS (
            SELECT 1 FROM request_log_requestrecord l
            WHERE l.tenant_id = r.tenant_id AND l.request_id = r.request_id AND l.started_at > r.started_at
                AND l.cache_layer <> ''
        ))
), sources AS (
    SELECT s.request_id, max(s.total_ms) AS total_ms FROM request_log_requestrecord s
    WHERE s.tenant_id = %(tenant)s AND s.cache_layer IN ('computed', 'prefix') AND s.outcome = 'completed'
        AND s.request_id IN (SELECT cache_source FROM hits)
    GROUP BY 1
)
SELECT h.cache_layer, sum(greatest(s.total_ms - h.total_ms, 0))
FROM hits h JOIN sources s ON s.request_id = h.cache_source GROUP BY 1
"""
_NAMES = (
    *("layer_requests", "input_tokens", "read_tokens", "output_tokens", "hit_input", "hit_output", "saved_femto"),
    "host_tokens",
)


@dataclass(frozen=True)
class LayerUsage:
    """What one layer served. `input_tokens` of the prefix cache are the tokens that were read from it.

    Requests that read a part of their prompt from CPU memory are those of the layer `host_memory`.
    """

    layer: CacheLayer
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    saved_femto: int = 0
    saved_ms: int = 0


@dataclass(frozen=True)
class CacheLayers:
    """The layers in the order in which they are tried."""

    layers: tuple[LayerUsage, ...]

    @property
    def requests(self) -> int:
        return sum(layer.requests for layer in self.layers)

    @property
    def hits(self) -> int:
        """Return the number of requests whose answer was not computed."""
        served = (CacheLayer.EXACT, CacheLayer.SINGLE_FLIGHT, CacheLayer.SEMANTIC)
        return sum(layer.requests for layer in self.layers if layer.layer in served)

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.requests if self.requests else None

    @property
    def saved_femto(self) -> int:
        return sum(layer.saved_femto for layer in self.layers)

    @property
    def saved_ms(self) -> int:
        return sum(layer.saved_ms for layer in self.layers)


def cache_layers(tenant_id: int, start: datetime, end: datetime) -> CacheLayers:
    """Return requests, tokens and savings by cache layer. The tenant's scope must be open."""
    rows = request_sums(tenant_id, start, end, ("cache_layer",), _NAMES)
    with connection.cursor() as cursor:
        cursor.execute(_SAVED_MS, {"tenant": tenant_id, "start": start, "end": end})
        saved_ms = {layer: int(total) for layer, total in cursor.fetchall()}
    found: dict[CacheLayer, LayerUsage] = {}
    read = output = uncached = host = 0
    for layer in CacheLayer:
        sums = rows.get((layer.value,), dict.fromkeys(_NAMES, 0))
        found[layer] = LayerUsage(
            layer,
            sums["layer_requests"],
            sums["hit_input"],
            sums["hit_output"],
            sums["saved_femto"],
            saved_ms.get(layer.value, 0),
        )
        uncached, read = uncached + sums["input_tokens"], read + sums["read_tokens"]
        output, host = output + sums["output_tokens"], host + sums["host_tokens"]
    prefix, computed = found[CacheLayer.PREFIX], found[CacheLayer.COMPUTED]
    found[CacheLayer.PREFIX] = replace(prefix, input_tokens=read - host, output_tokens=0)
    found[CacheLayer.HOST_MEMORY] = replace(found[CacheLayer.HOST_MEMORY], input_tokens=host, output_tokens=0)
    found[CacheLayer.COMPUTED] = replace(computed, input_tokens=uncached, output_tokens=output)
    return CacheLayers(tuple(found.values()))
