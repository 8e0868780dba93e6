"""Key snapshots: the compiled, versioned record of each API key for gateways. Does not import Django.

`tenants.actions` compiles a key, its project, its tenant and their limits into an `ApiKeySnapshot`. The table
`tenants_apikeysnapshot` stores it under the key's hash. Gateways read only these records.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import msgspec

from tenants.limits.token_buckets import WINDOWS
from tenants.routing_policies.experiments import RunningExperiment
from tenants.routing_policies.policy import Policy

KEY_START = "sk-mr-"
SCOPES = ("inference", "manage", "models", "endpoints", "cache", "billing")
_VISIBLE = 12  # displayed characters of a secret: the prefix and six of its 43 random characters
VALKEY_SECONDS = 60  # TTL of the gateways' shared copy
_VALKEY_PREFIX = "millrace:api_key:"
UnknownParameters = Literal["reject", "warn"]  # what happens to unknown fields of requests
AnswerCacheScope = Literal["tenant", "project"]  # the owner of the keys that share cached answers


class LimitSetSnapshot(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """Rate limits of a tenant, project or key, for one model or all models. None: no limit.

    All sets that apply to a request are enforced together. Usage is counted in the set's own buckets, which all its
    keys share.
    """

    id: int  # ID of the LimitSet; names the buckets
    scope: str  # "tenant", "project" or "key"
    model: str = ""  # requested or served model; empty: all models
    dry_run: bool = False  # rejects nothing; counts the requests that it would reject
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_per_day: int | None = None
    input_tokens_per_day: int | None = None
    output_tokens_per_day: int | None = None
    tokens_per_day: int | None = None
    concurrency: int | None = None  # concurrent requests
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    long_prompt_threshold: int | None = None  # tokens from which a prompt is long, with a separate queue
    long_prompt_concurrency: int | None = None  # concurrent requests with long prompts

    @cached_property
    def windows(self) -> list[tuple[str, str, tuple[int, int], int]]:
        """Return the name, the counted amount, the period and the limit of each rate limit of this set."""
        limits = [(name, counts, period, getattr(self, name)) for name, counts, period in WINDOWS]
        return [limit for limit in limits if limit[-1] is not None]


class LimitSnapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """All limits that apply to a key: its own, its project's and its tenant's, for all models and for single models."""

    sets: tuple[LimitSetSnapshot, ...] = ()

    def of(self, *models: str) -> list[LimitSetSnapshot]:
        """Return the sets that apply to a request for a model with any of these names."""
        return [limits for limits in self.sets if not limits.model or limits.model in models]


class ApiKeySnapshot(msgspec.Struct, frozen=True):
    """The compiled data of an API key for admission."""

    key_id: int
    tenant_id: int
    project_id: int
    scopes: tuple[str, ...]
    models: tuple[str, ...] | None  # names that the key may use; None: all
    expires_at: int | None  # microseconds since 1970, UTC; the key is expired from this time on
    revoked: bool
    suspended: bool  # the tenant or the project is suspended
    limits: LimitSnapshot
    version: int  # increases by 1 with each compilation
    allowed_ip_ranges: tuple[str, ...] | None = None  # CIDR; None: all
    policies: dict[str, Policy] = {}  # by the tenant's model name
    weight: float = 1.0  # weight in fair sharing, relative to other tenants
    content_retention_days: int = 0  # retention of prompts and completions; 0: not stored
    # Whether unknown fields of requests are rejected, or dropped and named; None: as the platform's setting.
    unknown_parameters: UnknownParameters | None = None
    allowed_origins: tuple[str, ...] = ()  # origins of web pages that may read responses, in addition to the platform's
    answer_cache_seconds: int = 0  # lifetime of cached answers; 0: answers are not cached
    answer_cache_sampled: bool = False  # whether answers with a temperature above 0 are cached too
    credentials: dict[str, int] = {}  # model name -> the tenant's own upstream credential for it
    experiments: dict[str, RunningExperiment] = {}  # by the requested model name
    semantic_cache_max_error_percent: int = 0  # percentage of wrong answers to similar questions; 0: none are served
    answer_cache_scope: AnswerCacheScope = "tenant"
    credential_versions: dict[str, int] = {}  # model name -> version of the secret in `credentials`

    @property
    def may_replace_answers(self) -> bool:
        """Return whether the key may replace answers that other keys of the tenant receive from the answer cache."""
        return "cache" in self.scopes

    def serves_similar(self, name: str) -> bool:
        """Return whether a model name serves cached answers to similar questions."""
        policy = self.policies.get(name)
        has_consent = self.answer_cache_seconds and self.semantic_cache_max_error_percent
        return bool(has_consent) and policy is not None and policy.semantic_cache


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ApiKeySnapshot).decode


def new_secret() -> str:
    """Return a new API key of 256 random bits. It is shown once and never stored."""
    return KEY_START + secrets.token_urlsafe(32)


def hash_key(secret: str, pepper: str) -> bytes:
    """Return the stored hash of a key. A key has 256 random bits, so a salt or a slow hash is not needed."""
    return with_pepper(_digest(secret), pepper)


def with_pepper(digest: bytes, pepper: str) -> bytes:
    """Return the HMAC of a key's SHA-256 with a pepper. Peppers are not in the database, so a dump cannot test keys."""
    return hmac.digest(pepper.encode(), digest, "sha256")


def possible_hashes(secret: str, peppers: Sequence[str]) -> tuple[bytes, ...]:
    """Return all hashes under which a key can be stored: with each pepper, newest first, and without a pepper."""
    digest = _digest(secret)
    return (*(with_pepper(digest, pepper) for pepper in peppers), digest)


def pepper_id(pepper: str) -> str:
    """Return the ID of a pepper, which does not reveal it."""
    return hashlib.sha256(b"millrace key pepper\0" + pepper.encode()).hexdigest()[:8]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def visible_prefix(secret: str) -> str:
    """Return the displayed prefix of a key."""
    return secret[:_VISIBLE]


def valkey_name(key_hash: bytes) -> str:
    """Return the key in Valkey of the gateways' copy of a snapshot."""
    return _VALKEY_PREFIX + key_hash.hex()
