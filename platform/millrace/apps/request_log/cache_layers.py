"""Requests, tokens and savings of a tenant by cache layer.

Requests and layers are those of the request log, tokens and money those of the settled usage. A request whose usage is
not settled yet has no tokens. The time that an exact or semantic hit saved is the latency of the request whose answer
was returned minus its own. It is known while both records are in the request log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from django.db import connection

from billing.models import UsageChange, UsageEvent
from millrace.apps.request_log.models import CacheLayer

# A request has one record, except for a line of a batch that another gateway has continued; the last record counts.
# The prompts of a request are usage of `<request>.<number>`; its shadow, `<request>.s`, does not count.
_LAYERS = """
WITH records AS (
    SELECT DISTINCT ON (request_id) request_id, cache_layer, cache_source, total_ms, outcome
    FROM request_log_requestrecord
    WHERE tenant_id = %(tenant)s AND started_at >= %(start)s AND started_at < %(end)s AND cache_layer <> ''
    ORDER BY request_id, started_at DESC
), usage AS (
    SELECT split_part(u.request_id, '.', 1) AS request_id,
        sum(u.uncached + u.cache_write_5m + u.cache_write_1h) AS input,
        sum(u.cache_read) AS read, sum(u.output) AS output, sum(u.answer_hit_input) AS hit_input,
        sum(u.answer_hit_output) AS hit_output, sum(u.saved_femto) AS saved
    FROM {changes} u
    WHERE u.tenant_id = %(tenant)s AND u.admitted_at >= %(start)s - interval '1 hour'
        AND u.admitted_at < %(end)s + interval '2 days'
        AND split_part(u.request_id, '.', 1) IN (SELECT request_id FROM records)
        AND split_part(u.request_id, '.', 2) <> 's'
    GROUP BY 1
), host AS (
    SELECT split_part(e.request_id, '.', 1) AS request_id, sum(least(e.host_tokens, e.cache_read)) AS tokens
    FROM {events} e
    WHERE e.tenant_id = %(tenant)s AND e.admitted_at >= %(start)s - interval '1 hour'
        AND e.admitted_at < %(end)s + interval '2 days' AND e.host_tokens > 0 AND e.outcome <> 'failed'
        AND split_part(e.request_id, '.', 1) IN (SELECT request_id FROM records WHERE cache_layer = 'prefix')
    GROUP BY 1
), sources AS (
    SELECT s.request_id, max(s.total_ms) AS total_ms FROM request_log_requestrecord s
    WHERE s.tenant_id = %(tenant)s AND s.cache_layer IN ('computed', 'prefix') AND s.outcome = 'completed'
        AND s.request_id IN (SELECT cache_source FROM records WHERE cache_layer IN ('exact', 'semantic'))
    GROUP BY 1
)
SELECT CASE WHEN h.tokens > 0 THEN 'host_memory' ELSE r.cache_layer END, count(*),
    coalesce(sum(u.input), 0), coalesce(sum(u.read), 0), coalesce(sum(u.output), 0),
    coalesce(sum(u.hit_input), 0), coalesce(sum(u.hit_output), 0), coalesce(sum(u.saved), 0),
    coalesce(sum(greatest(s.total_ms - r.total_ms, 0)) FILTER (WHERE r.cache_layer IN ('exact', 'semantic')), 0),
    coalesce(sum(h.tokens), 0)
FROM records r LEFT JOIN usage u USING (request_id) LEFT JOIN host h USING (request_id)
    LEFT JOIN sources s ON s.request_id = r.cache_source
GROUP BY 1
"""
_NONE = (0,) * 9


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
    with connection.cursor() as cursor:
        cursor.execute(
            _LAYERS.format(changes=UsageChange._meta.db_table, events=UsageEvent._meta.db_table),
            {"tenant": tenant_id, "start": start, "end": end},
        )
        rows = {row[0]: tuple(int(value) for value in row[1:]) for row in cursor.fetchall()}
    found: dict[CacheLayer, LayerUsage] = {}
    read = output = uncached = host = 0
    for layer in CacheLayer:
        row = rows.get(layer.value, _NONE)
        requests, row_input, row_read, row_output, hit_input, hit_output, saved, saved_ms, row_host = row
        found[layer] = LayerUsage(layer, requests, hit_input, hit_output, saved, saved_ms)
        uncached, read, output = uncached + row_input, read + row_read, output + row_output
        host += row_host
    prefix, computed = found[CacheLayer.PREFIX], found[CacheLayer.COMPUTED]
    found[CacheLayer.PREFIX] = replace(prefix, input_tokens=read - host, output_tokens=0)
    found[CacheLayer.HOST_MEMORY] = replace(found[CacheLayer.HOST_MEMORY], input_tokens=host, output_tokens=0)
    found[CacheLayer.COMPUTED] = replace(computed, input_tokens=uncached, output_tokens=output)
    return CacheLayers(tuple(found.values()))
