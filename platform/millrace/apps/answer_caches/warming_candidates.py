"""Stored prompts that may be worth computing ahead: frequent prompts, and long prefixes that several prompts share.

They are found by the digests of stored prompts (`prompt_digests`), without the prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.answer_caches.prompt_digests import (
    PATHS,
    PromptCount,
    PromptDigests,
    compute_digests,
    count_prompts,
    digested_requests,
    prefix_body,
    read_body,
)
from millrace.apps.request_log.models import CacheLayer

DAY = timedelta(days=1)
HISTORY_DAYS = 7
MIN_REQUESTS = 2  # with a prompt
MIN_PREFIX_REQUESTS = 3
_CACHEABLE_MISSES = ("not_cached", "no-cache", "leader_failed")


class StoredRequest(NamedTuple):
    """A request whose prompt is stored."""

    request_id: str
    started_at: datetime
    endpoint: str
    key_id: int
    model: str
    prompt_tokens: int
    max_tokens: int
    reserved_nano: int | None
    cache_layer: str
    is_cacheable: bool  # its answer may be stored in the answer cache


@dataclass
class Candidate:
    """A prompt that may be computed ahead, with the requests that had it."""

    cache: WarmedPrompt.Cache
    fingerprint: bytes
    path: str
    prefix_share: float = 1.0  # share of the prompt's characters
    messages: int = 0  # number of messages in the prefix
    choices: int = 1  # choices per answer
    requests: list[StoredRequest] = field(default_factory=list)  # newest first

    def body_of(self, text: str) -> dict[str, Any] | None:
        """Return the body of the request that computes the prompt, from the stored body of the newest one."""
        body = read_body(text)
        if body is None or self.cache == WarmedPrompt.Cache.ANSWER:
            return body
        return prefix_body(body, self.messages)

    @property
    def newest(self) -> StoredRequest:
        return self.requests[0]

    @property
    def computed_at(self) -> datetime | None:
        """Return when the prompt was last computed, which filled the cache."""
        layers = (CacheLayer.COMPUTED, CacheLayer.PREFIX)
        return next((request.started_at for request in self.requests if request.cache_layer in layers), None)

    def probability(self, now: datetime, window: timedelta, observed_since: datetime) -> tuple[int, int]:
        """Return the probability of a request within the window from now on, as a fraction.

        It is the share of the earlier days with such a request at this time of the day, with one more day of each kind.
        """
        used = days = 0
        for number in range(1, HISTORY_DAYS + 1):
            start = now - number * DAY
            if start < observed_since:
                break
            days += 1
            used += any(start <= request.started_at < start + window for request in self.requests)
        return used + 1, days + 2


class WarmingCandidates(NamedTuple):
    """The candidates of a tenant, and the time of the oldest request that was read."""

    found: list[Candidate]
    observed_since: datetime


def digest_history(tenant_id: int, now: datetime) -> None:
    """Compute the missing digests of the history that candidates are found in. Call outside of a transaction."""
    compute_digests(tenant_id, _start_of_history(now))


def count_history(tenant_id: int, now: datetime) -> PromptCount:
    """Return the number of prompts in the history that candidates are found in. The tenant's scope must be open."""
    return count_prompts(tenant_id, _start_of_history(now))


def _start_of_history(now: datetime) -> datetime:
    return now - HISTORY_DAYS * DAY - timedelta(hours=1)


def find_candidates(tenant_id: int, now: datetime) -> WarmingCandidates:
    """Return the frequent prompts and shared prefixes of the tenant's digested prompts. Its scope must be open."""
    answers: dict[bytes, Candidate] = {}
    prefixes: dict[bytes, Candidate] = {}
    parents: dict[bytes, bytes] = {}
    observed_since = now
    for request, digests in stored_requests(tenant_id, _start_of_history(now)):
        observed_since = request.started_at
        path = PATHS[request.endpoint]
        if digests.answer not in answers:
            answer = Candidate(WarmedPrompt.Cache.ANSWER, digests.answer, path, choices=digests.choices)
            answers[digests.answer] = answer
        answers[digests.answer].requests.append(request)
        parent = b""
        for prefix in digests.prefixes:
            if prefix.fingerprint not in prefixes:
                prefixes[prefix.fingerprint] = Candidate(
                    WarmedPrompt.Cache.PREFIX, prefix.fingerprint, path, prefix.share, messages=prefix.messages
                )
                parents[prefix.fingerprint] = parent
            prefixes[prefix.fingerprint].requests.append(request)
            parent = prefix.fingerprint
    frequent = [each for each in answers.values() if len(each.requests) >= MIN_REQUESTS and _is_cacheable(each)]
    return WarmingCandidates([*frequent, *_longest(prefixes, parents)], observed_since)


def stored_requests(tenant_id: int, start: datetime) -> Iterator[tuple[StoredRequest, PromptDigests]]:
    """Yield the requests with their digests, newest first. The tenant's scope must be open."""
    for (*columns, note), digests in digested_requests(tenant_id, start):
        yield StoredRequest._make([*columns, _may_be_cached(note)]), digests


def _longest(prefixes: Mapping[bytes, Candidate], parents: Mapping[bytes, bytes]) -> list[Candidate]:
    """Return the shared prefixes that cover the most text, none of which contains another one."""
    shared = [each for each in prefixes.values() if len(each.requests) >= MIN_PREFIX_REQUESTS]
    shared.sort(key=lambda each: -len(each.requests) * each.prefix_share * each.newest.prompt_tokens)
    chosen: dict[bytes, Candidate] = {}
    covered: set[bytes] = set()
    for candidate in shared:
        chain = [candidate.fingerprint]
        while parent := parents[chain[-1]]:
            chain.append(parent)
        if candidate.fingerprint not in covered and not chosen.keys() & set(chain):
            chosen[candidate.fingerprint] = candidate
            covered.update(chain)
    return list(chosen.values())


def _is_cacheable(candidate: Candidate) -> bool:
    """Return whether all requests with the prompt permit to store its answer."""
    return all(request.is_cacheable for request in candidate.requests)


def _may_be_cached(note: Any) -> bool:
    if isinstance(note, str):  # JSON of a raw query
        note = json.loads(note)
    if not isinstance(note, dict) or note.get("no_store"):
        return False
    return "layer" in note or note.get("miss") in _CACHEABLE_MISSES


def keys_of(candidates: Sequence[Candidate]) -> set[int]:
    """Return the IDs of the API keys that had the candidates' prompts."""
    return {request.key_id for candidate in candidates for request in candidate.requests}
