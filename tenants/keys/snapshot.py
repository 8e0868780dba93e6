"""What the data plane knows of an API key: one compiled, versioned record per key. Free of Django.

`tenants.actions` compiles a key, its project, its tenant and their limits into a `ApiKeySnapshot` and keeps it in the
table `tenants_apikeysnapshot` under the key's hash; the gateway reads these records and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

import msgspec

from tenants.routing_policies.policy import Policy

KEY_START = "sk-mr-"
SCOPES = ("inference", "manage", "models", "endpoints")
_VISIBLE = 12  # characters of a secret that may be shown: the start, and six of its 43 random characters
VALKEY_SECONDS = 60  # how long the gateways' shared copy lives
_VALKEY_PREFIX = "millrace:api_key:"


class LimitSetSnapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one tenant, project or key may use, of one model or of all together. None: no limit.

    The sets that apply to a request hold all at once. What was used is counted in the set's own buckets, which all keys
    under it share.
    """

    id: int  # names its buckets: the row it was compiled from
    scope: str  # whom it limits: "tenant", "project" or "key"
    model: str = ""  # a model's name, as asked for or as served; empty: all models together
    dry_run: bool = False  # refuses nothing; what it would have refused is counted
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_per_day: int | None = None
    input_tokens_per_day: int | None = None
    output_tokens_per_day: int | None = None
    tokens_per_day: int | None = None
    concurrency: int | None = None  # requests at once
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    long_prompt_threshold: int | None = None  # long jobs: prompts with at least this many tokens, with their own queue
    long_prompt_concurrency: int | None = None  # long jobs at once


class LimitSnapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """Every limit on a key's way: its own, its project's and its tenant's, of all models and of single ones."""

    sets: tuple[LimitSetSnapshot, ...] = ()

    def of(self, *models: str) -> list[LimitSetSnapshot]:
        """Return the sets that apply to a request for a model, under any of its names."""
        return [each for each in self.sets if not each.model or each.model in models]


class ApiKeySnapshot(msgspec.Struct, frozen=True):
    """One API key with all that admission needs to know of it."""

    key_id: int
    tenant_id: int
    project_id: int
    tenant_slug: str
    scopes: tuple[str, ...]
    models: tuple[str, ...] | None  # names this key may use; None: all
    expires_at: int | None  # microseconds since 1970, UTC; the key is dead from this instant on
    revoked: bool
    suspended: bool  # the tenant or the project is
    limits: LimitSnapshot
    version: int  # grows by one with each compilation
    allowed_ip_ranges: tuple[str, ...] | None = None  # networks it may be used from, as `10.0.0.0/8`; None: any
    policies: dict[str, Policy] = {}  # what the tenant's own logical model names mean
    weight: float = 1.0  # the tenant's share where tenants wait for each other, in proportion to the others'
    content_retention_days: int = 0  # how long prompts and answers are kept; 0: not at all


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ApiKeySnapshot).decode


def new_secret() -> str:
    """Return a fresh API key: 256 random bits, shown once to its owner and never stored."""
    return KEY_START + secrets.token_urlsafe(32)


def hash_key(secret: str, pepper: str) -> bytes:
    """Return what is stored of a key, and found by. With 256 random bits a salt or a slow hash would add nothing."""
    return with_pepper(_digest(secret), pepper)


def with_pepper(digest: bytes, pepper: str) -> bytes:
    """Return a key's SHA-256 mixed with a secret that is not in the database, so a database dump cannot test keys."""
    return hmac.digest(pepper.encode(), digest, "sha256")


def possible_hashes(secret: str, peppers: Sequence[str]) -> tuple[bytes, ...]:
    """Every hash a key may be stored under: with each pepper, the newest first, and without any, as it once was."""
    digest = _digest(secret)
    return (*(with_pepper(digest, pepper) for pepper in peppers), digest)


def pepper_id(pepper: str) -> str:
    """Names a pepper without telling it."""
    return hashlib.sha256(b"millrace key pepper\0" + pepper.encode()).hexdigest()[:8]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def visible_prefix(secret: str) -> str:
    """Return what may be shown of a key to tell it from others."""
    return secret[:_VISIBLE]


def valkey_name(key_hash: bytes) -> str:
    """Where the gateway keeps its copy of a snapshot in Valkey."""
    return _VALKEY_PREFIX + key_hash.hex()
