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

import struct
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import redis.asyncio as redis

from millrace.gateway.core.commands import CommandConnection
from millrace.gateway.core.limit_status import LimitCheck, LimitStatus
from tenants.keys.snapshot import LimitSetSnapshot
from tenants.limits.token_buckets import WINDOW_INDEXES, WINDOWS, buckets_key, start_of

LEASE_MS = 15_000  # how long a slot stays taken after its gateway fails
MAX_LIMIT = 10**11  # higher limits would not be exact and are not enforced
_COUNTERS_SECONDS = 40 * 86_400
_BUCKET, _SLOT, _LENGTH = 0, 1, 2
ENFORCED = 0  # the group of all enforced limits
_NO_LIMITS = (-1, 0) * len(WINDOWS)  # limit and cost of each window
_SET = struct.Struct(f"<{1 + len(_NO_LIMITS)}d")

# The buckets of a limit set are one string (see tenants.limits.token_buckets). Binary numbers take a tenth of the time
# of msgpack or texts in these scripts, and a string takes less than the fields of a hash.
_BUCKETS = f"""
local windows = {len(WINDOWS)}
local ticks_of = {{{", ".join(str(period[0]) for _, _, period in WINDOWS)}}}
local tick_of = {{{", ".join(str(period[1]) for _, _, period in WINDOWS)}}}
local state_format = '<' .. string.rep('d', 2 * windows)
local set_format = '<' .. string.rep('d', 1 + 2 * windows)
local set_bytes = 8 * (1 + 2 * windows)
local function state_of(stored)
    local state = stored and {{struct.unpack(state_format, stored)}} or {{}}
    if not stored then for w = 1, 2 * windows do state[w] = 0 end end
    return state
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_of = {{}}  -- the current tick of each window
for w = 1, windows do now_of[w] = math.floor(now / tick_of[w]) end
local max, min = math.max, math.min
local function level_of(state, w, limit)
    local elapsed, ticks = max(0, now_of[w] - state[2 * w]), ticks_of[w]
    if elapsed >= ticks then return 0 end
    return max(0, min(state[2 * w - 1], limit * ticks) - elapsed * limit)
end
"""

# KEYS: the buckets of each limit set, the slots, the tenant's counters of the day. ARGV: the request ID, the lease in
# milliseconds, the counters' TTL in seconds, the number of limit sets, the limit sets, the slots, the lengths, and the
# names of all checks, each followed by a comma. A limit set is its group, and the limit (-1: none) and the cost for
# each window. A slot is a group and a limit; a length is a group, a limit and a cost. Returns two numbers for each
# check: the milliseconds until it would fit (0: it fits, -1: never), and the level or the number of slots after the
# call. All numbers are packed as doubles.
_ADMIT = f"""{_BUCKETS}
local failed, results, has_failed = {{}}, {{}}, false
local function add_result(group, wait, level)
    results[#results + 1] = wait
    results[#results + 1] = level
    if wait ~= 0 then failed[group], has_failed = true, true end
end

local num_sets, sets, states = tonumber(ARGV[4]), {{}}, {{}}
local stored = num_sets > 0 and redis.call('MGET', unpack(KEYS, 1, num_sets)) or {{}}
for k = 1, num_sets do
    local set, state = {{struct.unpack(set_format, ARGV[5], (k - 1) * set_bytes + 1)}}, state_of(stored[k])
    sets[k], states[k] = set, state
    for w = 1, windows do
        local limit = set[2 * w]
        if limit >= 0 then
            local cost, level, wait = set[2 * w + 1], level_of(state, w, limit), 0
            local over = level + (cost - limit) * ticks_of[w]
            if cost > limit then wait = -1 elseif over > 0 then wait = math.ceil(over / limit) * tick_of[w] end
            add_result(set[1], wait, level)
        end
    end
end
local num_slots, held = #KEYS - 1 - num_sets, {{}}
for k = 1, num_slots do
    local group, limit = struct.unpack('<dd', ARGV[6], (k - 1) * 16 + 1)
    local key, wait = KEYS[num_sets + k], 0
    redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
    local level = redis.call('ZCARD', key)
    held[k] = level >= limit and redis.call('ZSCORE', key, ARGV[1])
    if held[k] then level = level - 1 end
    if limit < 1 then wait = -1 elseif level >= limit then wait = 1000 end
    add_result(group, wait, level)
end
for first = 1, #ARGV[7], 24 do
    local group, limit, cost = struct.unpack('<ddd', ARGV[7], first)
    add_result(group, cost > limit and -1 or 0, 0)
end

local i, groups = 0, {{}}
for k = 1, num_sets do
    local set, state, group, has_changed, ttl = sets[k], states[k], sets[k][1], false, 0
    local is_taken = not failed[{ENFORCED}] and not failed[group]
    for w = 1, windows do
        if set[2 * w] >= 0 then
            local cost = set[2 * w + 1]
            i = i + 1
            groups[i] = group
            if is_taken and cost > 0 then
                results[2 * i] = results[2 * i] + cost * ticks_of[w]
                state[2 * w - 1], state[2 * w], has_changed = results[2 * i], now_of[w], true
            end
        end
        if state[2 * w] > 0 then ttl = max(ttl, (ticks_of[w] + 1) * tick_of[w]) end
    end
    if has_changed then redis.call('SET', KEYS[k], struct.pack(state_format, unpack(state)), 'PX', ttl) end
end
for k = 1, num_slots do
    local key, group = KEYS[num_sets + k], struct.unpack('<d', ARGV[6], (k - 1) * 16 + 1)
    i = i + 1
    groups[i] = group
    if not failed[{ENFORCED}] and not failed[group] then
        local added = redis.call('ZADD', key, now + ARGV[2], ARGV[1])
        if added == 1 or held[k] then results[2 * i] = results[2 * i] + 1 end
        if redis.call('PTTL', key) < tonumber(ARGV[2]) then redis.call('PEXPIRE', key, 2 * ARGV[2]) end
    end
end
if has_failed then
    for first = 1, #ARGV[7], 24 do
        i = i + 1
        groups[i] = struct.unpack('<d', ARGV[7], first)
    end
    i = 0
    for name in string.gmatch(ARGV[8], '([^,]+),') do
        i = i + 1
        if results[2 * i - 1] ~= 0 and (groups[i] == {ENFORCED} or not failed[{ENFORCED}]) then
            redis.call('HINCRBY', KEYS[#KEYS], (groups[i] == {ENFORCED} and 'refused:' or 'dry:') .. name, 1)
            redis.call('EXPIRE', KEYS[#KEYS], ARGV[3])
        end
    end
end
return struct.pack('<' .. string.rep('d', #results), unpack(results))
"""

# KEYS: the buckets of each limit set, the slots. ARGV: the request ID, the number of limit sets, the limit sets as for
# the admission. The costs are the amounts to release.
_RELEASE = f"""{_BUCKETS}
local num_sets = tonumber(ARGV[2])
for k = 1, num_sets do
    local stored = redis.call('GET', KEYS[k])
    if stored then
        local set, state = {{struct.unpack(set_format, ARGV[3], (k - 1) * set_bytes + 1)}}, state_of(stored)
        for w = 1, windows do
            local amount = set[2 * w + 1]
            if amount > 0 then
                local level = level_of(state, w, set[2 * w])
                state[2 * w - 1], state[2 * w] = max(0, level - amount * ticks_of[w]), now_of[w]
            end
        end
        redis.call('SET', KEYS[k], struct.pack(state_format, unpack(state)), 'KEEPTTL')
    end
end
for k = num_sets + 1, #KEYS do redis.call('ZREM', KEYS[k], ARGV[1]) end
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
    for group, set_ in _number_groups(sets):
        start = start_of(tenant_id, set_.id)
        buckets = buckets_key(tenant_id, set_.id)
        for name, counts, period, limit in set_.windows:
            if limit <= MAX_LIMIT:
                counted = charged and counts == "requests" and not set_.model
                amount = 0 if counted else getattr(cost, counts)
                checks.append(LimitCheck(buckets, group, _BUCKET, limit, amount, period, set_, name, counts))
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


def _number_groups(sets: Iterable[LimitSetSnapshot]) -> Iterable[tuple[int, LimitSetSnapshot]]:
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

    request_id: str
    checks: tuple[LimitCheck, ...]

    @property
    def slots(self) -> list[str]:
        return [check.key for check in self.checks if check.check_type == _SLOT]


class LimitStore:
    """The limits' counters in Valkey. Every method runs one script and may raise `redis.RedisError`."""

    def __init__(self, broker: redis.Redis, commands: CommandConnection | None = None) -> None:
        self._commands = commands or CommandConnection(broker)
        self._is_shared = commands is not None
        self._admit_script = broker.register_script(_ADMIT)
        self._release_script = broker.register_script(_RELEASE)
        self._renew_script = broker.register_script(_RENEW)

    async def take(
        self,
        tenant_id: int,
        request_id: str,
        checks: Sequence[LimitCheck],
        unwanted: Callable[[TakenLimits], None] | None = None,
    ) -> tuple[TakenLimits | None, list[LimitStatus]]:
        """Take all enforced limits or none, and each dry-run set or none of it.

        Args:
            unwanted: receives what was taken for a caller that was cancelled meanwhile.

        Returns:
            What was taken, or None if an enforced limit rejects the request, and the state of each limit.
        """
        buckets, slots, lengths = (
            [check for check in checks if check.check_type == check_type] for check_type in (_BUCKET, _SLOT, _LENGTH)
        )
        checks = [*buckets, *slots, *lengths]
        keys, sets = _pack_sets((check, check.cost) for check in buckets)
        arguments = [
            request_id,
            LEASE_MS,
            _COUNTERS_SECONDS,
            len(keys),
            sets,
            _pack(number for check in slots for number in (check.group, check.limit)),
            _pack(number for check in lengths for number in (check.group, check.limit, check.cost)),
            "".join([f"{check.set.id}:{check.name}," for check in checks]),
        ]
        keys += [check.key for check in slots]
        keys.append(counters_key(tenant_id, datetime.now(UTC)))

        def read(reply: bytes) -> tuple[TakenLimits | None, list[LimitStatus]]:
            numbers = map(int, struct.unpack(f"<{2 * len(checks)}d", reply))
            limit_statuses = [LimitStatus(check, next(numbers), next(numbers)) for check in checks]
            failed = {status.check.group for status in limit_statuses if status.wait_ms}
            if ENFORCED in failed:
                return None, limit_statuses
            taken = [check for check in checks if check.group not in failed and check.check_type != _LENGTH]
            return TakenLimits(request_id, tuple(taken)), limit_statuses

        def read_late(reply: bytes) -> None:
            taken, _ = read(reply)
            if taken is not None and unwanted is not None:
                unwanted(taken)

        return read(await self._commands.run(self._admit_script, keys, arguments, read_late))

    async def release(self, taken: TakenLimits, unused: LimitCost) -> None:
        """Release the ended request's slots and the `unused` amounts."""
        amounts = [
            (check, amount)
            for check in taken.checks
            if check.check_type == _BUCKET and (amount := min(check.cost, getattr(unused, check.counts)))
        ]
        keys, sets = _pack_sets(amounts)
        arguments = [taken.request_id, len(keys), sets]
        keys += taken.slots
        if keys:
            await self._commands.run(self._release_script, keys, arguments)

    async def renew(self, slots: Sequence[tuple[str, str]]) -> None:
        """Renew the leases of the slots, given as (key, request ID). Restores slots that Valkey has lost."""
        if slots:
            await self._renew_script(keys=[key for key, _ in slots], args=[LEASE_MS, *(name for _, name in slots)])

    def close(self) -> None:
        """Close the connection to Valkey, unless it is shared."""
        if not self._is_shared:
            self._commands.close()


def _pack_sets(amounts: Iterable[tuple[LimitCheck, int]]) -> tuple[list[str], bytes]:
    """Return the key of each limit set's buckets, and the arguments of the scripts for these sets."""
    sets: dict[str, list[int]] = {}
    for check, amount in amounts:
        numbers = sets.get(check.key)
        if numbers is None:
            numbers = sets[check.key] = [check.group, *_NO_LIMITS]
        at = 1 + 2 * WINDOW_INDEXES[check.name]
        numbers[at], numbers[at + 1] = check.limit, amount
    return list(sets), b"".join([_SET.pack(*numbers) for numbers in sets.values()])


def _pack(numbers: Iterable[int]) -> bytes:
    values = list(numbers)
    return struct.pack(f"<{len(values)}d", *values)


def counters_key(tenant_id: int, day: datetime) -> str:
    """Return the Valkey key of a tenant's rejection counters of a day (UTC)."""
    return f"millrace:limit_counters:{{{tenant_id}}}:{day:%Y%m%d}"
