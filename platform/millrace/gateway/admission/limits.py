"""Rate limits and concurrency slots, counted in Valkey: one script per admission, exact across all gateways.

A rate limit (requests or tokens, per minute or day) is a token bucket that drains at the limit's rate: the full limit
can be used immediately, and the bucket is empty again after one period. All numbers are integers. A bucket's level is
the amount taken, times the ticks of its period, and each tick drains the limit, so nothing is rounded. Lua numbers are
exact below 2^53, so 60,000 ticks per minute allow limits of up to 10^11. The time is Valkey's own.

Slots (concurrent requests, concurrent long prompts) are leased: a sorted set of requests by the end of their lease,
which the gateway renews. The slots of a failed gateway are free again when their leases expire.

Enforced limits are taken together or not at all. A dry-run set is taken independently and rejects nothing. Rejections,
real and dry, are counted in the hash `millrace:limit_counters:<tenant>:<day>` for 40 days, in the fields
`refused:<set>:<limit>` and `dry:<set>:<limit>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import redis.asyncio as redis

from millrace.gateway.core.limit_status import LimitCheck, LimitStatus
from millrace.gateway.core.scripts import ScriptBatch
from tenants.keys.snapshot import LimitSetSnapshot
from tenants.limits.token_buckets import WINDOWS, start_of

LEASE_MS = 15_000  # how long a slot stays taken after its gateway fails
MAX_LIMIT = 10**11  # higher limits would not be exact and are not enforced
_COUNTERS_SECONDS = 40 * 86_400
_BUCKET, _SLOT, _LENGTH = 0, 1, 2
ENFORCED = 0  # the group of all enforced limits

# A bucket is a string: its level (amount taken times ticks) and the tick at which it had this level.
_LEVEL = """
local function level_of(stored, limit, ticks, at)
    if not stored then return 0 end
    local level, since = string.match(stored, '(%d+) (%d+)')
    local elapsed = math.max(0, at - tonumber(since))
    if elapsed >= ticks then return 0 end
    return math.max(0, math.min(tonumber(level), limit * ticks) - elapsed * limit)
end
local function keep_level(key, level, ticks, tick, at)
    redis.call('SET', key, string.format('%.0f %.0f', level, at), 'PX', (ticks + 1) * tick)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# KEYS: one for each check, first those of the buckets; last the tenant's counters of the day. ARGV: the checks
# (msgpack), the request ID, the lease in milliseconds, the counters' TTL in seconds, the number of buckets. A check is
# {group, check_type, limit, cost, ticks, tick, name}. Returns, for each check, the milliseconds until it would fit
# (0: it fits, -1: never), and the level or the number of slots after the call.
_ADMIT = f"""{_LEVEL}
local checks, failed, waits, levels = cmsgpack.unpack(ARGV[1]), {{}}, {{}}, {{}}
local buckets = tonumber(ARGV[5])
local stored = buckets > 0 and redis.call('MGET', unpack(KEYS, 1, buckets)) or {{}}
for i, check in ipairs(checks) do
    local group, check_type, limit, cost, ticks, tick = unpack(check, 1, 6)
    local wait, level = 0, 0
    if check_type == {_BUCKET} then
        level = level_of(stored[i], limit, ticks, math.floor(now / tick))
        local over = level + (cost - limit) * ticks
        if cost > limit then wait = -1 elseif over > 0 then wait = math.ceil(over / limit) * tick end
    elseif check_type == {_SLOT} then
        redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now)
        level = redis.call('ZCARD', KEYS[i])
        if redis.call('ZSCORE', KEYS[i], ARGV[2]) then level = level - 1 end
        if limit < 1 then wait = -1 elseif level >= limit then wait = 1000 end
    elseif cost > limit then
        wait = -1
    end
    if wait ~= 0 then failed[group] = true end
    waits[i], levels[i] = wait, level
end
for i, check in ipairs(checks) do
    local group, check_type, limit, cost, ticks, tick, name = unpack(check)
    if waits[i] ~= 0 and (group == {ENFORCED} or not failed[{ENFORCED}]) then
        local counter = group == {ENFORCED} and 'refused:' or 'dry:'
        redis.call('HINCRBY', KEYS[#KEYS], counter .. name, 1)
        redis.call('EXPIRE', KEYS[#KEYS], ARGV[4])
    elseif not failed[{ENFORCED}] and not failed[group] and cost > 0 then
        if check_type == {_BUCKET} then
            levels[i] = levels[i] + cost * ticks
            keep_level(KEYS[i], levels[i], ticks, tick, math.floor(now / tick))
        elseif check_type == {_SLOT} then
            redis.call('ZADD', KEYS[i], now + ARGV[3], ARGV[2])
            redis.call('PEXPIRE', KEYS[i], ARGV[3])
            levels[i] = levels[i] + 1
        end
    end
end
return {{waits, levels}}
"""

# KEYS: one for each released check. ARGV: {check_type, limit, amount, ticks, tick} of each (msgpack), the request ID.
_RELEASE = f"""{_LEVEL}
for i, taken in ipairs(cmsgpack.unpack(ARGV[1])) do
    local check_type, limit, amount, ticks, tick = unpack(taken)
    if check_type == {_SLOT} then
        redis.call('ZREM', KEYS[i], ARGV[2])
    else
        local at = math.floor(now / tick)
        local level = level_of(redis.call('GET', KEYS[i]), limit, ticks, at)
        if level > 0 then keep_level(KEYS[i], math.max(0, level - amount * ticks), ticks, tick, at) end
    end
end
"""

# KEYS: slots; ARGV: the lease in milliseconds, then the request ID in each slot.
_RENEW = """
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
for i, key in ipairs(KEYS) do
    redis.call('ZADD', key, ends, ARGV[i + 1])
    redis.call('PEXPIRE', key, ARGV[1])
end
"""


class LimitCost(NamedTuple):
    """What a request takes of each type of rate limit."""

    requests: int
    input: int  # tokens
    output: int

    @property
    def total(self) -> int:
        return self.input + self.output


def make_checks(
    tenant_id: int, sets: Iterable[LimitSetSnapshot], cost: LimitCost, *, charged: bool = False
) -> list[LimitCheck]:
    """Return the checks for a request of this cost.

    With `charged`, the request was already counted by all limit sets that apply to every model.
    """
    checks: list[LimitCheck] = []
    for group, set_ in _grouped(sets):
        start = start_of(tenant_id, set_.id)
        for name, counts, period, short in WINDOWS:
            limit = getattr(set_, name)
            if limit is not None and limit <= MAX_LIMIT:
                counted = charged and counts == "requests" and not set_.model
                amount = 0 if counted else getattr(cost, counts)
                checks.append(LimitCheck(start + short, group, _BUCKET, limit, amount, period, set_, name, counts))
        if set_.concurrency is not None:
            checks.append(_slot_check(start + "c", group, set_.concurrency, set_, "concurrency"))
        if (
            set_.long_prompt_concurrency is not None
            and set_.long_prompt_threshold is not None
            and cost.input >= set_.long_prompt_threshold
        ):
            checks.append(
                _slot_check(start + "l", group, set_.long_prompt_concurrency, set_, "long_prompt_concurrency")
            )
        if group != ENFORCED:
            checks += _length_checks(start, group, set_, cost)
    return checks


def is_long(sets: Iterable[LimitSetSnapshot], prompt_tokens: int) -> bool:
    """Return whether a prompt of this length counts as long."""
    return any(
        limit_set.long_prompt_threshold is not None and prompt_tokens >= limit_set.long_prompt_threshold
        for limit_set in sets
        if not limit_set.dry_run
    )


def _grouped(sets: Iterable[LimitSetSnapshot]) -> Iterable[tuple[int, LimitSetSnapshot]]:
    for number, set_ in enumerate(sets, start=1):
        yield (number if set_.dry_run else ENFORCED), set_


def _slot_check(key: str, group: int, limit: int, set_: LimitSetSnapshot, name: str) -> LimitCheck:
    return LimitCheck(key, group, _SLOT, limit, 1, (1, 1), set_, name, name)


def _length_checks(start: str, group: int, set_: LimitSetSnapshot, cost: LimitCost) -> Iterable[LimitCheck]:
    """Yield the length checks of a dry-run set. Enforced length limits are checked before."""
    for name, amount in (("max_prompt_tokens", cost.input), ("max_output_tokens", cost.output)):
        limit = getattr(set_, name)
        if limit is not None:
            yield LimitCheck(start, group, _LENGTH, limit, amount, (1, 1), set_, name, name)


class TakenLimits(NamedTuple):
    """The limits and slots that an admitted request has taken."""

    tenant_id: int
    request_id: str
    checks: tuple[LimitCheck, ...]

    @property
    def slots(self) -> list[str]:
        return [check.key for check in self.checks if check.check_type == _SLOT]


class LimitStore:
    """The limits' counters in Valkey. Every method runs one script and may raise `redis.RedisError`."""

    def __init__(self, broker: redis.Redis) -> None:
        self._batch = ScriptBatch(broker)
        self._admit_script = broker.register_script(_ADMIT)
        self._release_script = broker.register_script(_RELEASE)
        self._renew_script = broker.register_script(_RENEW)

    async def take(
        self, tenant_id: int, request_id: str, checks: Sequence[LimitCheck]
    ) -> tuple[TakenLimits | None, list[LimitStatus]]:
        """Take all enforced limits or none, and each dry-run set or none of it.

        Returns:
            What was taken, or None if an enforced limit rejects the request, and the state of each limit.
        """
        checks = sorted(checks, key=_buckets_first)
        packed = _encode(
            [
                [check.group, check.check_type, check.limit, check.cost, *check.period, f"{check.set.id}:{check.name}"]
                for check in checks
            ]
        )
        keys = [*(check.key for check in checks), counters_key(tenant_id, datetime.now(UTC))]
        buckets = sum(check.check_type == _BUCKET for check in checks)
        arguments = [packed, request_id, LEASE_MS, _COUNTERS_SECONDS, buckets]
        reply: Any = await self._batch.run(self._admit_script, keys, arguments)
        limit_statuses = [LimitStatus(check, wait, level) for check, wait, level in zip(checks, *reply, strict=True)]
        failed = {status.check.group for status in limit_statuses if status.wait_ms}
        if ENFORCED in failed:
            return None, limit_statuses
        taken = tuple(check for check in checks if check.group not in failed and check.check_type != _LENGTH)
        return TakenLimits(tenant_id, request_id, taken), limit_statuses

    async def release(self, taken: TakenLimits, unused: LimitCost) -> None:
        """Release the ended request's slots and the `unused` amounts."""
        keys, packed = [], []
        for check in taken.checks:
            amount = 0 if check.check_type == _SLOT else min(check.cost, getattr(unused, check.counts))
            if amount or check.check_type == _SLOT:
                keys.append(check.key)
                packed.append([check.check_type, check.limit, amount, *check.period])
        if keys:
            await self._batch.run(self._release_script, keys, [_encode(packed), taken.request_id])

    async def renew(self, slots: Sequence[tuple[str, str]]) -> None:
        """Renew the leases of the slots, given as (key, request ID). Restores slots that Valkey has lost."""
        if slots:
            await self._renew_script(keys=[key for key, _ in slots], args=[LEASE_MS, *(name for _, name in slots)])


def _buckets_first(check: LimitCheck) -> bool:
    return check.check_type != _BUCKET


def counters_key(tenant_id: int, day: datetime) -> str:
    """Return the Valkey key of a tenant's rejection counters of a day (UTC)."""
    return f"millrace:limit_counters:{{{tenant_id}}}:{day:%Y%m%d}"


_encode = msgspec.msgpack.Encoder().encode
