"""Results of shadows: the answers of requests compared with those of their shadows, by pair of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection

MAX_PAIRS = 50
# Only shadows that have answered are compared. Costs are compared if both are known.
_ANSWERED = "code = ''"
_PRICED = "code = '' AND cost_femto IS NOT NULL AND shadow_cost_femto IS NOT NULL"
_QUANTILES = "percentile_disc(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY {0})"
_RESULTS = f"""
SELECT served_model, shadow_model, count(*), count(*) FILTER (WHERE {_ANSWERED}),
    count(*) FILTER (WHERE is_operator_paid),
    count(*) FILTER (WHERE {_ANSWERED} AND has_schema),
    count(*) FILTER (WHERE {_ANSWERED} AND has_schema AND failure <> 'schema'),
    count(*) FILTER (WHERE {_ANSWERED} AND has_schema AND shadow_failure <> 'schema'),
    count(*) FILTER (WHERE {_ANSWERED} AND failure = ''),
    count(*) FILTER (WHERE {_ANSWERED} AND shadow_failure = ''),
    coalesce(sum(output_tokens) FILTER (WHERE {_ANSWERED}), 0),
    coalesce(sum(shadow_output_tokens) FILTER (WHERE {_ANSWERED}), 0),
    count(*) FILTER (WHERE {_PRICED}),
    coalesce(sum(cost_femto) FILTER (WHERE {_PRICED}), 0),
    coalesce(sum(shadow_cost_femto) FILTER (WHERE {_PRICED}), 0),
    {
    ", ".join(
        f"{_QUANTILES.format(name)} FILTER (WHERE {_ANSWERED})"
        for name in ("ttft_ms", "shadow_ttft_ms", "total_ms", "shadow_total_ms")
    )
}
FROM request_log_shadowcomparison
WHERE tenant_id = %(tenant)s AND requested_model = %(name)s AND started_at >= %(start)s AND started_at < %(end)s
GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT {MAX_PAIRS}
"""  # noqa: S608  (expressions from above, nothing from outside)
_CODES = """
SELECT served_model, shadow_model, code, count(*) FROM request_log_shadowcomparison
WHERE tenant_id = %(tenant)s AND requested_model = %(name)s AND started_at >= %(start)s AND started_at < %(end)s
    AND code <> ''
GROUP BY 1, 2, 3
"""


@dataclass(frozen=True)
class ComparedAnswers:
    """The answers of one side of a comparison."""

    model: str
    valid_schemas: int  # requests with a schema whose answers match it
    passed: int  # answers that passed all checks: schema, tool arguments, not empty
    output_tokens: int
    cost_femto: int  # cost of the requests whose costs are known on both sides
    ttft_p50_ms: int | None
    ttft_p95_ms: int | None
    total_p50_ms: int | None
    total_p95_ms: int | None


@dataclass(frozen=True)
class ShadowResult:
    """The comparison of a model with the shadow of its requests."""

    requests: int  # requests with a shadow
    compared: int  # requests whose shadow has answered
    operator_paid: int
    with_schema: int  # compared requests with a schema
    priced: int
    answered: ComparedAnswers
    shadow: ComparedAnswers
    codes: Counter[str]  # error codes of shadows without an answer


def shadow_results(tenant_id: int, name: str, start: datetime, end: datetime) -> list[ShadowResult]:
    """Return the results for a model name, the pair of models with the most requests first. The scope must be open."""
    values: dict[str, Any] = {"tenant": tenant_id, "name": name, "start": start, "end": end}
    codes: dict[tuple[str, str], Counter[str]] = {}
    with connection.cursor() as cursor:
        cursor.execute(_RESULTS, values)
        rows = cursor.fetchall()
        if any(compared < requests for _served, _shadow, requests, compared, *_rest in rows):
            cursor.execute(_CODES, values)
            for served, shadow, code, count in cursor.fetchall():
                codes.setdefault((served, shadow), Counter())[code] = count
    return [_result(row, codes.get((row[0], row[1]), Counter())) for row in rows]


def _result(row: Sequence[Any], codes: Counter[str]) -> ShadowResult:
    served, shadow, requests, compared, operator_paid, with_schema, *rest = row
    valid, passed, tokens, (priced, *costs), times = rest[0:2], rest[2:4], rest[4:6], rest[6:9], rest[9:13]
    live, other = (
        ComparedAnswers(
            model,
            valid[side],
            passed[side],
            int(tokens[side]),
            int(costs[side]),
            *(times[side] or (None, None)),
            *(times[side + 2] or (None, None)),
        )
        for side, model in enumerate((served, shadow))
    )
    return ShadowResult(requests, compared, operator_paid, with_schema, priced, live, other, codes)
