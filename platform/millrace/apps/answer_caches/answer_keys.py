"""The keys of cached answers in Valkey. Does not import Django.

- `millrace:answer:<tenant>:<answer>`: a cached answer, encrypted. It expires by itself.
- `millrace:answer_flight:<tenant>:<answer>`: the request that computes the answer at the moment (its leader).
- `millrace:answers:<tenant>`: a sorted set of the tenant's answers by their expiry.

An answer's ID is a keyed digest of the request, so the keys reveal nothing about prompts.
"""

from __future__ import annotations

_INDEX = "millrace:answers:"


def answer_key(tenant_id: int, answer_id: str) -> str:
    return f"millrace:answer:{tenant_id}:{answer_id}"


def flight_key(tenant_id: int, answer_id: str) -> str:
    return f"millrace:answer_flight:{tenant_id}:{answer_id}"


def index_key(tenant_id: int) -> str:
    return f"{_INDEX}{tenant_id}"


INDEX_PATTERN = f"{_INDEX}*"


def tenant_of(index: str) -> int:
    """Return the tenant of an index."""
    return int(index.removeprefix(_INDEX))
