"""Pins of all replicas, in the broker. A paid prompt prefix is billed as a cache read on every replica and after
restarts.

`millrace:pins:<tenant>` is a sorted set of block hashes. The hashes depend on a salt of tenant and model, so they are
the same on every replica of a model and differ between tenants. A score is the pin's expiry in milliseconds of the
broker's clock, times two, plus one for a pin of an hour. Pins are added with the execution's first tokens, before the
end that bills them. If an execution fails, its pins are removed (claims.FAIL).
"""

from __future__ import annotations

from collections.abc import Mapping

import redis
import structlog

from inference_worker.contract.messages import InferenceJob, claim_key, pins_key
from inference_worker.contract.prefix_digest import hash_block
from inference_worker.worker.engine_client import ActiveJob, PinnedPrefixes

log = structlog.get_logger(__name__)

MAX_PINS = 65_536  # pins of a tenant, about 8 MB; further blocks are not pinned and are billed as uncached

_SECONDS = {ord("m"): 300, ord("h"): 3600}
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# KEYS pins; ARGV hashes. The number of active pins, and a letter for each hash: m, minutes; h, an hour; -, no pin.
LOOK_UP = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now * 2 + 1))
local found = {}
for first = 1, #ARGV, 1000 do
    local scores = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, first, math.min(first + 999, #ARGV)))
    for _, score in ipairs(scores) do
        found[#found + 1] = score and (tonumber(score) % 2 == 1 and 'h' or 'm') or '-'
    end
end
return {redis.call('ZCARD', KEYS[1]), table.concat(found)}
"""
)

# KEYS claim, pins; ARGV attempt, number of hashes pinned for five minutes, these hashes, hashes pinned for an hour.
# Restarts the duration of each pin. The claim stores the new pins, which another attempt or a failure removes.
PIN = (
    """
local claim = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'pinned')
if claim[2] and (claim[1] ~= ARGV[1] or claim[2] ~= 'running') or claim[3] then return end
"""
    + _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now * 2 + 1))
local short, long = (now + 300000) * 2, (now + 3600000) * 2 + 1
local short_text, long_text = string.format('%.0f', short), string.format('%.0f', long)
local num_short, made = tonumber(ARGV[2]), {}
for first = 3, #ARGV, 1000 do
    local last = math.min(first + 999, #ARGV)
    local scores, pins = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, first, last)), {}
    for i = first, last do
        local known = tonumber(scores[i - first + 1])
        local hour = i - 2 > num_short or (known and known % 2 == 1)
        pins[#pins + 1] = hour and long_text or short_text
        pins[#pins + 1] = ARGV[i]
        if not known then
            made[#made + 1] = ARGV[i]
            made[#made + 1] = hour and long or short
        end
    end
    redis.call('ZADD', KEYS[2], unpack(pins))
end
redis.call('PEXPIRE', KEYS[2], 3600000)
if claim[2] and #made > 0 then redis.call('HSET', KEYS[1], 'pinned', cmsgpack.pack(made)) end
"""
)


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
