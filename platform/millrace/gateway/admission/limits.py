"""Rate limits and places, counted in the broker: one script an admission, exact however many gateways there are.

A window (requests or tokens, a minute or a day) is a bucket that drains at its limit's rate: it may be filled at once,
and is empty again after its period. All is in integers: a bucket's level is what was taken times the ticks of its
period, and each tick drains the limit, so nothing is rounded and nothing is lost. Below 2^53 a Lua number is exact:
60,000 ticks a minute leave room for limits of 10^11. Time is the broker's own.

Places (requests at once, long jobs at once) are leased: a sorted set of requests by the end of their lease, which the
gateway renews. A dead gateway's places come back when their leases have run out.

Enforced limits are taken together or not at all. A dry-run set is taken or not by itself; it refuses nothing, and what
it would have refused is counted, as are real refusals, in the hash `millrace:limit_counters:<tenant>:<day>`: field
`refused:<set>:<limit>` or `dry:<set>:<limit>`, kept for 40 days.
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

LEASE_MS = 15_000  # how long a place outlives its gateway
MAX_LIMIT = 10**11  # more would not be exact; it is as good as none
_COUNTERS_SECONDS = 40 * 86_400
_BUCKET, _PLACE, _FIXED = 0, 1, 2
ENFORCED = 0  # the group of all enforced limits

# A bucket is a string: its level, in takings times ticks, and the tick it was at.
_LEVEL = """
local function level_of(held, limit, ticks, at)
    if not held then return 0 end
    local level, since = string.match(held, '(%d+) (%d+)')
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

# KEYS: one for each check; first the buckets', then the others'; last the tenant's counters of the day. ARGV: the
# checks (msgpack), the request, the lease's milliseconds, the counters' seconds, the number of buckets. A check is
# {group, kind, limit, cost, ticks, tick, name}. The answer is, for each check, the milliseconds until it would fit (0:
# it does; -1: never), and the level or places after all was taken (or, of a group that was refused, as they are).
_ADMIT = f"""{_LEVEL}
local checks, failed, waits, levels = cmsgpack.unpack(ARGV[1]), {{}}, {{}}, {{}}
local buckets = tonumber(ARGV[5])
local held = buckets > 0 and redis.call('MGET', unpack(KEYS, 1, buckets)) or {{}}
for i, check in ipairs(checks) do
    local group, kind, limit, cost, ticks, tick = unpack(check, 1, 6)
    local wait, level = 0, 0
    if kind == {_BUCKET} then
        level = level_of(held[i], limit, ticks, math.floor(now / tick))
        local over = level + (cost - limit) * ticks
        if cost > limit then wait = -1 elseif over > 0 then wait = math.ceil(over / limit) * tick end
    elseif kind == {_PLACE} then
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
    local group, kind, limit, cost, ticks, tick, name = unpack(check)
    if waits[i] ~= 0 and (group == {ENFORCED} or not failed[{ENFORCED}]) then
        local why = group == {ENFORCED} and 'refused:' or 'dry:'
        redis.call('HINCRBY', KEYS[#KEYS], why .. name, 1)
        redis.call('EXPIRE', KEYS[#KEYS], ARGV[4])
    elseif not failed[{ENFORCED}] and not failed[group] and cost > 0 then
        if kind == {_BUCKET} then
            levels[i] = levels[i] + cost * ticks
            keep_level(KEYS[i], levels[i], ticks, tick, math.floor(now / tick))
        elseif kind == {_PLACE} then
            redis.call('ZADD', KEYS[i], now + ARGV[3], ARGV[2])
            redis.call('PEXPIRE', KEYS[i], ARGV[3])
            levels[i] = levels[i] + 1
        end
    end
end
return {{waits, levels}}
"""

# KEYS: one for each of what is given back. ARGV: {kind, limit, back, ticks, tick} of each (msgpack), the request.
_GIVE_BACK = f"""{_LEVEL}
for i, taken in ipairs(cmsgpack.unpack(ARGV[1])) do
    local kind, limit, back, ticks, tick = unpack(taken)
    if kind == {_PLACE} then
        redis.call('ZREM', KEYS[i], ARGV[2])
    else
        local at = math.floor(now / tick)
        local level = level_of(redis.call('GET', KEYS[i]), limit, ticks, at)
        if level > 0 then keep_level(KEYS[i], math.max(0, level - back * ticks), ticks, tick, at) end
    end
end
"""

# KEYS: places, ARGV: the lease's milliseconds, then the request in each place.
_RENEW = """
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
for i, key in ipairs(KEYS) do
    redis.call('ZADD', key, ends, ARGV[i + 1])
    redis.call('PEXPIRE', key, ARGV[1])
end
"""


class LimitCost(NamedTuple):
    """What a request takes of each kind of window."""

    requests: int
    input: int  # tokens
    output: int

    @property
    def total(self) -> int:
        return self.input + self.output


def checks_of(
    tenant_id: int, sets: Iterable[LimitSetSnapshot], cost: LimitCost, *, charged: bool = False
) -> list[LimitCheck]:
    """Everything that must hold for a request of this cost, and is taken by it. `charged`: the request itself was
    counted before, by all sets that are for every model."""
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
            checks.append(_place(start + "c", group, set_.concurrency, set_, "concurrency"))
        if (
            set_.long_prompt_concurrency is not None
            and set_.long_prompt_threshold is not None
            and cost.input >= set_.long_prompt_threshold
        ):
            checks.append(_place(start + "l", group, set_.long_prompt_concurrency, set_, "long_prompt_concurrency"))
        if group != ENFORCED:
            checks += _fixed(start, group, set_, cost)
    return checks


def is_long(sets: Iterable[LimitSetSnapshot], prompt_tokens: int) -> bool:
    """Whether a prompt of this length is a long job."""
    return any(
        each.long_prompt_threshold is not None and prompt_tokens >= each.long_prompt_threshold
        for each in sets
        if not each.dry_run
    )


def _grouped(sets: Iterable[LimitSetSnapshot]) -> Iterable[tuple[int, LimitSetSnapshot]]:
    for number, set_ in enumerate(sets, start=1):
        yield (number if set_.dry_run else ENFORCED), set_


def _place(key: str, group: int, limit: int, set_: LimitSetSnapshot, name: str) -> LimitCheck:
    return LimitCheck(key, group, _PLACE, limit, 1, (1, 1), set_, name, name)


def _fixed(start: str, group: int, set_: LimitSetSnapshot, cost: LimitCost) -> Iterable[LimitCheck]:
    """Yield the longest prompt and answer of a dry-run set, only to be counted: enforced ones are refused before."""
    for name, amount in (("max_prompt_tokens", cost.input), ("max_output_tokens", cost.output)):
        limit = getattr(set_, name)
        if limit is not None:
            yield LimitCheck(start, group, _FIXED, limit, amount, (1, 1), set_, name, name)


class TakenLimits(NamedTuple):
    """What an admitted request holds."""

    tenant_id: int
    request_id: str
    checks: tuple[LimitCheck, ...]

    @property
    def places(self) -> list[str]:
        return [check.key for check in self.checks if check.kind == _PLACE]


class LimitStore:
    """The limits' counters in the broker. Every method is one script, and may raise `redis.RedisError`."""

    def __init__(self, broker: redis.Redis) -> None:
        self._batch = ScriptBatch(broker)
        self._admit_script = broker.register_script(_ADMIT)
        self._give_back_script = broker.register_script(_GIVE_BACK)
        self._renew_script = broker.register_script(_RENEW)

    async def take(
        self, tenant_id: int, request_id: str, checks: Sequence[LimitCheck]
    ) -> tuple[TakenLimits | None, list[LimitStatus]]:
        """Take all enforced limits or none, and each dry-run set or none of it. None: refused; the standings say by
        which."""
        checks = sorted(checks, key=_buckets_first)
        packed = _encode([[c.group, c.kind, c.limit, c.cost, *c.period, f"{c.set.id}:{c.name}"] for c in checks])
        keys = [*(check.key for check in checks), counters_key(tenant_id, datetime.now(UTC))]
        buckets = sum(check.kind == _BUCKET for check in checks)
        arguments = [packed, request_id, LEASE_MS, _COUNTERS_SECONDS, buckets]
        reply: Any = await self._batch.run(self._admit_script, keys, arguments)
        limit_statuses = [LimitStatus(check, wait, level) for check, wait, level in zip(checks, *reply, strict=True)]
        failed = {standing.check.group for standing in limit_statuses if standing.wait_ms}
        if ENFORCED in failed:
            return None, limit_statuses
        held = tuple(check for check in checks if check.group not in failed and check.kind != _FIXED)
        return TakenLimits(tenant_id, request_id, held), limit_statuses

    async def give_back(self, taken: TakenLimits, back: LimitCost) -> None:
        """Release the ended request's concurrency and the unused amounts in `back`."""
        keys, packed = [], []
        for check in taken.checks:
            amount = 0 if check.kind == _PLACE else min(check.cost, getattr(back, check.counts))
            if amount or check.kind == _PLACE:
                keys.append(check.key)
                packed.append([check.kind, check.limit, amount, *check.period])
        if keys:
            await self._batch.run(self._give_back_script, keys, [_encode(packed), taken.request_id])

    async def renew(self, places: Sequence[tuple[str, str]]) -> None:
        """Keep the places (key, request) for another lease; also those the broker has lost."""
        if places:
            await self._renew_script(keys=[key for key, _ in places], args=[LEASE_MS, *(name for _, name in places)])


def _buckets_first(check: LimitCheck) -> bool:
    return check.kind != _BUCKET


def counters_key(tenant_id: int, day: datetime) -> str:
    """Where a tenant's refusals, real and dry, of a day (UTC) are counted."""
    return f"millrace:limit_counters:{{{tenant_id}}}:{day:%Y%m%d}"


_encode = msgspec.msgpack.Encoder().encode
