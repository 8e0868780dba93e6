"""Digests of stored prompts, from which cache warming finds frequent prompts and shared prefixes without their bodies.

A web job decodes each body once, and stores its digests with it (`RequestContent.digests`). Only the stored prompts of
completed requests are read, and of those only the newest `MAX_READ`. Lines of batches do not count. They include the
warmed prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connection

from millrace.apps.request_log.stored_prompts import decode_body
from tenants.isolation.scopes import tenant_scope

MAX_READ = 5_000
MAX_DIGESTED_BYTES = 8 * 2**20  # bodies that one call reads
_CHUNK_BYTES, _CHUNK_ROWS = 2**20, 200
MIN_PREFIX_CHARACTERS = 2_000
MAX_PREFIXES = 8  # per prompt
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
_REQUESTS = """
SELECT r.request_id, r.started_at, r.endpoint, r.key_id, r.served_model, r.prompt_tokens, r.max_tokens,
    r.reserved_nano, r.cache_layer, r.route -> 'answer_cache' AS note, c.digests, octet_length(c.body) AS size
FROM request_log_requestcontent c
JOIN request_log_requestrecord r USING (tenant_id, started_at, request_id)
WHERE c.tenant_id = %(tenant)s AND c.started_at >= %(start)s AND NOT c.truncated AND r.outcome = 'completed'
    AND r.batch_id IS NULL AND r.replay_of = '' AND r.prompts = 1 AND r.endpoint = ANY(%(endpoints)s)
    AND r.prompt_tokens IS NOT NULL AND r.max_tokens IS NOT NULL
ORDER BY c.started_at DESC LIMIT %(most)s
"""
_DIGESTED = """
SELECT request_id, started_at, endpoint, key_id, served_model, prompt_tokens, max_tokens, reserved_nano, cache_layer,
    note, digests
FROM ({requests}) r WHERE digests ? 'answer' ORDER BY started_at DESC
"""
_COUNT = "SELECT count(*), count(*) FILTER (WHERE digests IS NULL) FROM ({requests}) r"
# At least one body, whatever its size.
_UNDIGESTED = """
SELECT r.request_id, r.endpoint, c.body, r.size FROM (
    SELECT *, sum(size) OVER newest AS total, row_number() OVER newest AS number FROM ({requests}) r
    WHERE digests IS NULL WINDOW newest AS (ORDER BY started_at DESC, request_id)
) r JOIN request_log_requestcontent c ON c.tenant_id = %(tenant)s AND c.request_id = r.request_id
WHERE number = 1 OR number <= %(rows)s AND total <= %(bytes)s
"""
_STORE = """
UPDATE request_log_requestcontent c SET digests = d.digests::jsonb
FROM unnest(%(ids)s::text[], %(digests)s::text[]) AS d (request_id, digests)
WHERE c.tenant_id = %(tenant)s AND c.request_id = d.request_id
"""


class Prefix(NamedTuple):
    """The beginning of a conversation: its tools, system prompt and first messages."""

    fingerprint: bytes
    messages: int
    share: float  # share of the prompt's characters


class PromptDigests(NamedTuple):
    """What cache warming knows of a stored prompt."""

    answer: bytes  # digest of the prompt and its parameters
    choices: int
    prefixes: list[Prefix]  # shortest first


class PromptCount(NamedTuple):
    """The number of stored prompts that are read, and of those among them that have no digests yet."""

    stored: int
    undigested: int


def count_prompts(tenant_id: int, start: datetime) -> PromptCount:
    """Return the number of prompts since `start`, without their bodies. The scope must be open."""
    with connection.cursor() as cursor:
        cursor.execute(_COUNT.format(requests=_REQUESTS), _fields(tenant_id, start))
        return PromptCount._make(cursor.fetchone())


def compute_digests(tenant_id: int, start: datetime) -> int:
    """Compute the missing digests of prompts since `start`, the newest first, of at most MAX_DIGESTED_BYTES.

    No transaction is open while bodies are decoded. Returns the number of bytes.
    """
    read = 0
    while read < MAX_DIGESTED_BYTES:
        with tenant_scope(tenant_id), connection.cursor() as cursor:
            bounds = {"rows": _CHUNK_ROWS, "bytes": _CHUNK_BYTES}
            cursor.execute(_UNDIGESTED.format(requests=_REQUESTS), _fields(tenant_id, start) | bounds)
            rows = cursor.fetchall()
        if not rows:
            break
        digests = [_encode_digests(digest_body(PATHS[endpoint], text)) for _, endpoint, text, _ in rows]
        with tenant_scope(tenant_id), connection.cursor() as cursor:
            # Runs of one tenant update the rows one after another, so that they cannot deadlock.
            cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended('digests ' || %s, 0))", [str(tenant_id)])
            cursor.execute(_STORE, {"tenant": tenant_id, "ids": [row[0] for row in rows], "digests": digests})
        read += sum(size for *_, size in rows)
    return read


def digested_requests(tenant_id: int, start: datetime) -> Iterator[tuple[list[Any], PromptDigests]]:
    """Yield the columns of requests with their digests, newest first. The tenant's scope must be open."""
    with connection.chunked_cursor() as cursor:
        cursor.execute(_DIGESTED.format(requests=_REQUESTS), _fields(tenant_id, start))
        for *columns, stored in cursor:
            found = json.loads(stored)
            prefixes = [Prefix(bytes.fromhex(digest), number, share) for digest, number, share in found["prefixes"]]
            yield columns, PromptDigests(bytes.fromhex(found["answer"]), found["choices"], prefixes)


def _fields(tenant_id: int, start: datetime) -> dict[str, Any]:
    return {"tenant": tenant_id, "start": start, "endpoints": list(PATHS), "most": MAX_READ}


def _encode_digests(digests: PromptDigests | None) -> str:
    """Return the digests as JSON; an empty object if the prompt cannot be warmed."""
    if digests is None:
        return "{}"
    prefixes = [(each.fingerprint.hex(), each.messages, round(each.share, 6)) for each in digests.prefixes]
    return json.dumps({"answer": digests.answer.hex(), "choices": digests.choices, "prefixes": prefixes})


def digest_body(path: str, text: str) -> PromptDigests | None:
    """Return the digests of a stored body; None if it cannot be warmed."""
    body = read_body(text)
    if body is None:
        return None
    try:
        encoded = _encode_canonical(body)
        choices = body.get("n")
        return PromptDigests(
            hashlib.sha256(b"[" + _encode_canonical(path) + b"," + encoded + b"]").digest()[:FINGERPRINT_BYTES],
            choices if isinstance(choices, int) else 1,
            list(_prefixes(path, body, max(1, len(encoded)))),
        )
    except RecursionError:
        return None


def _prefixes(path: str, body: Mapping[str, Any], total: int) -> Iterator[Prefix]:
    """Yield the long prefixes of a conversation, shortest first: each ends before a message of the user."""
    messages = body.get("messages")
    if path not in (PATHS["chat.completions"], PATHS["messages"]) or not isinstance(messages, list):
        return
    head = _encode_canonical([path, {name: body[name] for name in _PREFIX_FIELDS if name in body}])
    digest, characters, count = hashlib.sha256(head), len(head), 0
    for number, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            if characters >= MIN_PREFIX_CHARACTERS:
                yield Prefix(digest.digest()[:FINGERPRINT_BYTES], number, min(1.0, characters / total))
                count += 1
            if count == MAX_PREFIXES:
                return
        text = _encode_canonical(message)
        digest.update(b"\0" + text)
        characters += len(text)


def prefix_body(body: Mapping[str, Any], messages: int) -> dict[str, Any]:
    """Return a request that computes the first messages of a conversation, and one token."""
    start = {name: body[name] for name in _PREFIX_FIELDS if name in body}
    turns = [*body["messages"][:messages], {"role": "user", "content": "."}]
    return start | {"messages": turns, "max_tokens": 1, "temperature": 0}


def read_body(text: str) -> dict[str, Any] | None:
    """Return a request's body without the fields that do not matter; None if it is not an object."""
    body = decode_body(text)
    if body is None or not isinstance(body.get("model"), str):
        return None
    kept = {name: value for name, value in body.items() if name not in _DROPPED and name not in _BREAKPOINTS}
    if not any(name in text for name in (*_BREAKPOINTS, "\\u")):  # a name may be escaped
        return kept
    return {name: _without_breakpoints(value) for name, value in kept.items()}


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


def _encode_canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
