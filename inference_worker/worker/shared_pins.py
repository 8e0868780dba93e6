"""Pins of all replicas, in the broker. A paid prompt prefix is billed as a cache read on every replica and after
restarts.

`millrace:pins:<tenant>` is a sorted set of block hashes. The hashes depend on a salt of tenant, model and the replica's
variant. So they are the same on every replica with the same files and dtype, and differ between tenants. A score is the
pin's expiry in milliseconds of the broker's clock, times two, plus one for a pin of an hour. Pins are added with the
execution's first tokens, before the end that bills them. If an execution fails, its pins are removed (claims.FAIL).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import redis
import structlog

from inference_worker.contract.messages import InferenceJob, claim_key, pins_key
from inference_worker.contract.prefix_digest import hash_block
from inference_worker.contract.script_files import read_script
from inference_worker.worker.engine_client import ActiveJob, PinnedPrefixes

log = structlog.get_logger(__name__)

MAX_PINS = 65_536  # pins of a tenant, about 8 MB; further blocks are not pinned and are billed as uncached

_SECONDS = {ord("m"): 300, ord("h"): 3600}
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

_LUA = Path(__file__).parent / "lua"
LOOK_UP = _NOW + read_script(_LUA / "look_up_pins.lua")
PIN = read_script(_LUA / "pin.lua", now=_NOW)


class SharedPins:
    """Reads a tenant's pins in the broker. Thread-safe."""

    def __init__(self, broker: redis.Redis, block_size: int) -> None:
        self._block_size = block_size
        self._look_up = broker.register_script(LOOK_UP)
        self._is_away = False

    def look_up(self, job: InferenceJob) -> PinnedPrefixes:
        """Return the tenant's pins of the job's prompt, in one round trip. While the broker is unavailable, none are
        known, and the prompt is billed as computed."""
        if job.input_lengths:
            return PinnedPrefixes()  # embeddings have no cache
        hashes = _hashes(job, self._block_size)
        try:
            count, letters = self._look_up(keys=[pins_key(job.billing_context.tenant_id)], args=hashes)
        except redis.RedisError as exc:
            if not self._is_away:
                log.warning("pin_lookup_failed", error=str(exc))
            self._is_away = True
            return PinnedPrefixes()
        self._is_away = False
        known = {block: _SECONDS[letter] for block, letter in zip(hashes, letters, strict=True) if letter in _SECONDS}
        return PinnedPrefixes(known, max(0, MAX_PINS - count))


def pin_keys(live: ActiveJob) -> list[str]:
    """Return the keys of the script PIN."""
    billing_context = live.job.billing_context
    return [claim_key(billing_context.request_id, billing_context.execution), pins_key(billing_context.tenant_id)]


def pin_args(live: ActiveJob, pins: Mapping[bytes, int]) -> list[int | bytes]:
    """Return the arguments of the script PIN, for `pins`: hash -> seconds."""
    short = [block for block, seconds in pins.items() if seconds <= 300]
    long = [block for block, seconds in pins.items() if seconds > 300]
    return [live.attempt, len(short), *short, *long]


def _hashes(job: InferenceJob, block_size: int) -> list[bytes]:
    """Return the hashes of the prompt's full blocks, as the engine computes them."""
    tokens, hashes = job.prompt_token_ids, list[bytes]()
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hashes[-1] if hashes else None
        hashes.append(hash_block(parent, tokens[end - block_size : end], job.cache_salt))
    return hashes
