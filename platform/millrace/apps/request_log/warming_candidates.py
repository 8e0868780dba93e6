"""Stored prompts that may be worth computing ahead: frequent prompts, and long prefixes that several prompts share.

Only the stored prompts of completed requests are read, and of those only the newest `MAX_READ`. Lines of batches, which
include the warmed prompts themselves, do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import connection

from millrace.apps.request_log.models import CacheLayer, WarmedPrompt

DAY = timedelta(days=1)
HISTORY_DAYS = 7
MAX_READ = 5_000
MIN_REQUESTS = 2  # with a prompt
MIN_PREFIX_REQUESTS = 3
MIN_PREFIX_CHARACTERS = 2_000
MAX_PREFIXES = 8  # of one prompt
FINGERPRINT_BYTES = 16
# Endpoint of the request log -> path of the inference API.
PATHS: Mapping[str, str] = {
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
# Fields that do not change the answer, or that a line of a batch cannot have.
_DROPPED = frozenset(
    (
        *("stream", "stream_options", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_retention", "prompt_cache_options"),
    )
)
_BREAKPOINTS = ("cache_control", "prompt_cache_breakpoint")
# Fields of a conversation that the tokens of its prefix depend on.
_PREFIX_FIELDS = (
    *("model", "system", "tools", "prompt_cache_key", "reasoning_effort", "reasoning", "thinking"),
    "chat_template_kwargs",
)
_CACHEABLE_MISSES = ("not_cached", "no-cache", "leader_failed")
_REQUESTS = """
SELECT r.request_id, r.started_at, r.endpoint, r.key_id, r.served_model, r.prompt_tokens, r.max_tokens,
    r.reserved_nano, r.cache_layer, r.route -> 'answer_cache', c.body
FROM request_log_requestcontent c
JOIN request_log_requestrecord r USING (tenant_id, started_at, request_id)
WHERE c.tenant_id = %(tenant)s AND c.started_at >= %(start)s AND NOT c.truncated AND r.outcome = 'completed'
    AND r.batch_id IS NULL AND r.replay_of = '' AND r.prompts = 1 AND r.endpoint = ANY(%(endpoints)s)
    AND r.prompt_tokens IS NOT NULL AND r.max_tokens IS NOT NULL
ORDER BY c.started_at DESC LIMIT %(most)s
"""


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
    body: dict[str, Any]
    prefix_share: float = 1.0  # of the prompt's characters
    requests: list[StoredRequest] = field(default_factory=list)  # newest first

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


class Prefix(NamedTuple):
    """The beginning of a conversation: its tools, system prompt and first messages."""

    fingerprint: bytes
    messages: int
    characters: int


class WarmingCandidates(NamedTuple):
    """The candidates of a tenant, and the time of the oldest request that was read."""

    found: list[Candidate]
    observed_since: datetime


def find_candidates(tenant_id: int, now: datetime) -> WarmingCandidates:
    """Return the frequent prompts and shared prefixes of the tenant's stored prompts. Its scope must be open."""
    answers: dict[bytes, Candidate] = {}
    prefixes: dict[bytes, Candidate] = {}
    parents: dict[bytes, bytes] = {}
    observed_since = now
    for request, body in stored_requests(tenant_id, now - HISTORY_DAYS * DAY - timedelta(hours=1)):
        observed_since = request.started_at
        path = PATHS[request.endpoint]
        digest = _digest(path, body)
        answer = answers.setdefault(digest, Candidate(WarmedPrompt.Cache.ANSWER, digest, path, body))
        answer.requests.append(request)
        total, parent = max(1, len(_encoded(body))), b""
        for prefix in prefixes_of(path, body):
            if prefix.fingerprint not in prefixes:
                share = min(1.0, prefix.characters / total)
                start = prefix_body(path, body, prefix.messages)
                prefixes[prefix.fingerprint] = Candidate(
                    WarmedPrompt.Cache.PREFIX, prefix.fingerprint, path, start, share
                )
                parents[prefix.fingerprint] = parent
            prefixes[prefix.fingerprint].requests.append(request)
            parent = prefix.fingerprint
    frequent = [each for each in answers.values() if len(each.requests) >= MIN_REQUESTS and _is_cacheable(each)]
    return WarmingCandidates([*frequent, *_longest(prefixes, parents)], observed_since)


def stored_requests(tenant_id: int, start: datetime) -> Iterator[tuple[StoredRequest, dict[str, Any]]]:
    """Yield the requests with their bodies, newest first. The tenant's scope must be open."""
    fields: dict[str, Any] = {"tenant": tenant_id, "start": start, "endpoints": list(PATHS), "most": MAX_READ}
    with connection.chunked_cursor() as cursor:
        cursor.execute(_REQUESTS, fields)
        for *columns, note, text in cursor:
            body = _read_body(text)
            if body is not None:
                yield StoredRequest._make([*columns, _may_be_cached(note)]), body


def prefixes_of(path: str, body: Mapping[str, Any]) -> Iterator[Prefix]:
    """Yield the long prefixes of a conversation, shortest first: each ends before a message of the user."""
    messages = body.get("messages")
    if path not in (PATHS["chat.completions"], PATHS["messages"]) or not isinstance(messages, list):
        return
    head = _encoded([path, {name: body[name] for name in _PREFIX_FIELDS if name in body}])
    digest, characters, count = hashlib.sha256(head), len(head), 0
    for number, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            if characters >= MIN_PREFIX_CHARACTERS:
                yield Prefix(digest.digest()[:FINGERPRINT_BYTES], number, characters)
                count += 1
            if count == MAX_PREFIXES:
                return
        text = _encoded(message)
        digest.update(b"\0" + text)
        characters += len(text)


def prefix_body(path: str, body: Mapping[str, Any], messages: int) -> dict[str, Any]:
    """Return a request that computes the first messages of a conversation, and one token."""
    start = {name: body[name] for name in _PREFIX_FIELDS if name in body}
    turns = [*body["messages"][:messages], {"role": "user", "content": "."}]
    return start | {"messages": turns, "max_tokens": 1, "temperature": 0}


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


def _read_body(text: str) -> dict[str, Any] | None:
    """Return a request's body without the fields that do not matter; None if it is not an object."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        return None
    kept = {name: value for name, value in body.items() if name not in _DROPPED}
    return {name: _without_breakpoints(value) for name, value in kept.items() if name not in _BREAKPOINTS}


def _without_breakpoints(value: Any) -> Any:
    """Return a part of a body without its cache breakpoints, whose tokens would be billed as cache writes."""
    if isinstance(value, list):
        return [_without_breakpoints(each) for each in value]
    if isinstance(value, dict):
        is_block = "type" in value or "role" in value or "name" in value
        return {
            name: _without_breakpoints(each)
            for name, each in value.items()
            if not (is_block and name in _BREAKPOINTS and isinstance(each, dict))
        }
    return value


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(_encoded(parts)).digest()[:FINGERPRINT_BYTES]


def _encoded(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def keys_of(candidates: Sequence[Candidate]) -> set[int]:
    """Return the IDs of the API keys that had the candidates' prompts."""
    return {request.key_id for candidate in candidates for request in candidate.requests}
