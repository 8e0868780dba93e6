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
from pathlib import Path
from typing import NamedTuple

import redis.asyncio as redis

from inference_worker.contract.command_connection import CommandConnection
from inference_worker.contract.script_files import read_script
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

_LUA = Path(__file__).parent / "lua"
_BUCKETS = read_script(
    _LUA / "buckets.lua",
    windows=len(WINDOWS),
    ticks_of=", ".join(str(period[0]) for _, _, period in WINDOWS),
    tick_of=", ".join(str(period[1]) for _, _, period in WINDOWS),
)
_ADMIT = _BUCKETS + read_script(_LUA / "admit.lua", enforced=ENFORCED)
_RELEASE = _BUCKETS + read_script(_LUA / "release.lua")
_RENEW = read_script(_LUA / "renew_slots.lua")


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
