"""Prompt advisor: the changing parts of prompts that defeat a tenant's prefix cache, and what they cost a month.

A request whose prompt began like an earlier one and then differed has the miss reason `prefix_changed` and the first
token that differs (`changed_at`). Requests of one key and model that differ at about the same token form a group. The
tokens after the change are computed again. If two prompts of a group are stored, their common end tells how many of
these tokens would be read from the cache if the changing part came last. Otherwise, all of them are assumed to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection

from billing.models import UsageEvent
from billing.pricing.rating import rate_cards
from billing.rates.pricing import Component, prices
from inference_worker.contract.request import PROMPT_CLASSES
from millrace.apps.request_log.stored_prompts import decode_body, read_bodies

WINDOW = 64  # tokens: changes within one window are one group
MAX_GROUPS = 10
MONTH, MICROSECOND = timedelta(days=30), timedelta(microseconds=1)
MAX_TEXT = 80  # characters of the changing part that are returned
_GROUPS = f"""
SELECT key_id, model, min(changed_at), count(*), sum(uncached),
    avg({" + ".join(PROMPT_CLASSES)})::int,
    (array_agg(price_version ORDER BY admitted_at DESC))[1], max(admitted_at),
    (array_agg(request_id ORDER BY admitted_at DESC))[1:2]
FROM {{events}}
WHERE tenant_id = %(tenant)s AND admitted_at >= %(start)s AND admitted_at < %(end)s
    AND miss_reason = 'prefix_changed' AND changed_at IS NOT NULL AND outcome = 'completed'
GROUP BY key_id, model, changed_at / %(window)s
HAVING count(*) > 1
ORDER BY sum(uncached) DESC LIMIT %(most)s
"""  # noqa: S608  (column names, nothing from outside)


@dataclass(frozen=True)
class PromptAdvice:
    """A changing part of the prompts of one key and model."""

    key_id: int
    model: str
    token_index: int  # index of the first token that changes
    requests: int
    recomputed_tokens: int
    avoidable_tokens: int
    is_upper_bound: bool  # no two prompts are stored, so all recomputed tokens count as avoidable
    text: str | None  # the changing part of the latest stored prompt
    cost_femto: int  # cost in the period, in excess of reading the avoidable tokens from the cache
    month_femto: int  # the same, for 30 days
    request_ids: Sequence[str]  # the latest ones


def prompt_advice(tenant_id: int, start: datetime, end: datetime) -> list[PromptAdvice]:
    """Return the changing parts, the most expensive first. The tenant's scope must be open."""
    with connection.cursor() as cursor:
        fields: dict[str, Any] = {"tenant": tenant_id, "start": start, "end": end, "window": WINDOW, "most": MAX_GROUPS}
        cursor.execute(_GROUPS.format(events=UsageEvent._meta.db_table), fields)
        rows = cursor.fetchall()
    bodies = dict(read_bodies(tenant_id, [request_id for row in rows for request_id in row[8]]))
    cards = rate_cards({row[6] for row in rows if row[6] is not None})
    found = []
    for key_id, model, index, requests, uncached, prompt_tokens, version, at, request_ids in rows:
        texts = [prompt_text(bodies[request_id]) for request_id in request_ids if request_id in bodies]
        change = find_change(texts[0], texts[1]) if len(texts) == 2 else None
        avoidable = round(uncached * change.avoidable_share) if change else int(uncached)
        card, femto = cards.get(version), 0
        if card is not None:
            rates = prices(card, prompt_tokens, round(at.timestamp() * 1_000_000))
            plain, read = rates.get(Component.UNCACHED), rates.get(Component.CACHE_READ)
            if plain is not None and read is not None:
                femto = avoidable * max(0, plain.nano_per_million - read.nano_per_million)
        found.append(
            PromptAdvice(
                key_id,
                model,
                index,
                requests,
                int(uncached),
                avoidable,
                change is None,
                change.text if change else None,
                femto,
                femto * (MONTH // MICROSECOND) // ((end - start) // MICROSECOND),
                request_ids,
            )
        )
    return sorted((each for each in found if each.avoidable_tokens), key=lambda each: (-each.cost_femto, each.key_id))


@dataclass(frozen=True)
class TextChange:
    """The part in which two prompts differ."""

    text: str
    avoidable_share: float  # the common end: a share of the text from the change on


def find_change(first: str, second: str) -> TextChange:
    """Return the difference between two texts: what is between their common start and their common end."""
    start = _common_length(first, second)
    rest = first[start:], second[start:]
    end = _common_length(rest[0][::-1], rest[1][::-1])
    longest = max(map(len, rest))
    return TextChange(rest[0][: len(rest[0]) - end][:MAX_TEXT], end / longest if longest else 0.0)


def _common_length(first: str, second: str) -> int:
    """Return the length of the common start of two texts."""
    if first[: len(second)] == second[: len(first)]:
        return min(len(first), len(second))
    return next(place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])


def prompt_text(body: str) -> str:
    """Return the texts of a request's prompt, in the order of the chat template: system, tools, messages."""
    request = decode_body(body)
    if request is None:
        return body
    names = ("system", "instructions", "tools", "messages", "prompt", "input")
    return "\n".join(text for name in names for text in _texts(request.get(name)))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
