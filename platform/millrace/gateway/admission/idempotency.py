"""`Idempotency-Key` on /v1: the same POST twice is done once, charged once, and answered twice with the same bytes.

In the broker, a record a key: what was sent (a hash), the call that has it (`owner`), the request that runs for it, and
a lease, which the owner's gateway renews. The answer is stored before its last byte is sent. So:

- another body under the key is a conflict, for a day;
- while the lease lasts, other calls are rejected and may retry later;
- where the owner left without an answer (its client went away, its gateway died and the lease ran out), the next call
  takes the record over and continues with the request that runs, from its log; if there is none, it starts again.

Refusals and failures are not stored: asked again, they are decided again.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from typing import NamedTuple

import msgspec
import redis.asyncio as redis
import structlog

from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import ApiError, invalid
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

IDEMPOTENCY_TTL_SECONDS = 24 * 3600
LEASE_MS = 15_000
MAX_KEY_BYTES = 255  # bytes
MAX_RESPONSE_BYTES = 2 * 2**20  # of one answer; a longer one is not stored, and not done again either
MAX_TENANT_BYTES = 64 * 2**20  # of a tenant's answers, compressed; the oldest go first
CONFLICT = "idempotency_conflict"

# KEYS record, answer; ARGV what was sent, the call, its request, lease in ms, seconds to keep.
_BEGIN = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HMGET', KEYS[1], 'sent', 'lease', 'done', 'request')
if held[1] and held[1] ~= ARGV[1] then return {'other'} end
if held[3] then return {'done', redis.call('GET', KEYS[2])} end
if held[1] and tonumber(held[2]) > now then return {'running'} end
redis.call('HSET', KEYS[1], 'sent', ARGV[1], 'owner', ARGV[2], 'lease', now + ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
if held[1] then return {'left', held[4]} end
redis.call('HSET', KEYS[1], 'request', ARGV[3])
return {'new'}
"""

# KEYS record; ARGV the call, lease in ms. 0: the next call may have it at once.
_LEASE = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then redis.call('HSET', KEYS[1], 'owner', '') end
local time = redis.call('TIME')
return redis.call('HSET', KEYS[1], 'lease', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2])
"""

# KEYS record; ARGV the call, the request that it runs now.
_RESTART = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'request', ARGV[2])
return 1
"""

# KEYS record; ARGV the call.
_FORGET = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

# KEYS record, answer, the tenant's answers by age, their sum; ARGV the call, the answer (empty: too long to store),
# seconds to keep, most bytes of the tenant.
_KEEP = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'done', 1)
redis.call('EXPIRE', KEYS[1], ARGV[3])
if #ARGV[2] == 0 then return 1 end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local sum = tonumber(redis.call('GET', KEYS[4]) or 0)
local function drop(members)
    for _, member in ipairs(members) do
        local size, key = string.match(member, '(%d+) (.+)')
        redis.call('ZREM', KEYS[3], member)
        redis.call('DEL', key)
        sum = sum - size
    end
end
drop(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[3]))
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('ZADD', KEYS[3], now, #ARGV[2] .. ' ' .. KEYS[2])
sum = sum + #ARGV[2]
while sum > tonumber(ARGV[4]) do drop(redis.call('ZRANGE', KEYS[3], 0, 0)) end
redis.call('SET', KEYS[4], sum, 'EX', ARGV[3])
redis.call('EXPIRE', KEYS[3], ARGV[3])
return 1
"""


class StoredResponse(msgspec.Struct, frozen=True):
    """A response, as it was sent."""

    request_id: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Replay(Exception):
    """The call was made before: this is its answer."""

    def __init__(self, answer: StoredResponse) -> None:
        super().__init__(answer.request_id)
        self.answer = answer


class Names(NamedTuple):
    """Where a key's record and answer are kept; all of one tenant's keys are in one slot of a cluster."""

    record: str
    answer: str
    by_age: str
    sum: str


class IdempotentCall:
    """One call with an Idempotency-Key, which is the one to be done."""

    def __init__(self, store: IdempotencyStore, names: Names, call: str, left: str | None) -> None:
        self._store = store
        self.names = names
        self.call = call
        self.left = left  # the request that an earlier call began and did not see the end of
        self.runs_on = False  # though its client has gone: the next call continues with it
        self.failed = False  # it was answered with an error, which is not kept
        self._over = False
        self._answer: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._body: list[bytes] = []
        self._size = 0

    def began(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Record the status and headers that were sent."""
        self._answer = status, headers

    def sent(self, body: bytes) -> None:
        """And this."""
        self._size += len(body)
        if self._size <= MAX_RESPONSE_BYTES:
            self._body.append(body)
        else:
            self._body.clear()

    async def restart(self, request_id: str) -> None:
        """Restart the key's call with this request, since the earlier one is gone.

        Raises:
            ApiError: 409, another call has taken the key.
        """
        if not await self._store.restart(self, request_id):
            raise running()
        self.left = None

    async def keep(self, request_id: str) -> None:
        """Store the complete response."""
        if self._answer is None or self.failed or self._over:
            return
        self._over = True
        status, headers = self._answer
        whole = b"".join(self._body) if self._size <= MAX_RESPONSE_BYTES else None
        await self._store.keep(self, None if whole is None else StoredResponse(request_id, status, headers, whole))

    async def end(self) -> None:
        """End the call, with or without a response. May be called twice."""
        if not self._over:
            self._over = True
            await self._store.end(self)


class IdempotencyStore:
    """The records in the broker, and the leases of the calls under way in this gateway."""

    def __init__(self, broker: redis.Redis) -> None:
        self._held: dict[str, IdempotentCall] = {}
        self._begin, self._lease, self._restart, self._forget, self._keep = (
            broker.register_script(script) for script in (_BEGIN, _LEASE, _RESTART, _FORGET, _KEEP)
        )
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._renewing = asyncio.create_task(self._renew())

    async def stop(self) -> None:
        if self._renewing is not None:
            await cancel_and_wait([self._renewing])

    async def begin(self, key: ApiKeySnapshot, name: bytes, sent: bytes, request_id: str) -> IdempotentCall:
        """Have the call done by its caller; `sent` is what makes it this call and no other: path and body, or a hash.

        Raises:
            Replay: it was done before.
            ApiError: 400, no proper name; 409, it is being done, or another one was under this name.
        """
        if not 0 < len(name) <= MAX_KEY_BYTES:
            raise invalid("Idempotency-Key", f"Idempotency-Key must have 1 to {MAX_KEY_BYTES} characters.")
        digest = hashlib.sha256(b"%d\0%s" % (key.key_id, name)).hexdigest()
        start = f"millrace:idempotency:{{{key.tenant_id}}}:"
        names = Names(f"{start}{digest}", f"{start}{digest}:answer", f"{start}by_age", f"{start}sum")
        state, *more = await self._begin(
            keys=[names.record, names.answer],
            args=[hashlib.sha256(sent).digest(), request_id, request_id, LEASE_MS, IDEMPOTENCY_TTL_SECONDS],
        )
        if state == b"other":
            raise ApiError(CONFLICT, "This Idempotency-Key was used for another request.")
        if state == b"done":
            if not more or more[0] is None:
                raise ApiError(CONFLICT, "This request was answered before; its answer is too large to be sent again.")
            raise Replay(msgspec.msgpack.decode(zlib.decompress(more[0]), type=StoredResponse))
        if state == b"running":
            raise running()
        once = IdempotentCall(self, names, request_id, more[0].decode() if state == b"left" else None)
        self._held[names.record] = once
        return once

    async def restart(self, once: IdempotentCall, request_id: str) -> bool:
        return bool(await self._restart(keys=[once.names.record], args=[once.call, request_id]))

    async def keep(self, once: IdempotentCall, answer: StoredResponse | None) -> None:
        self._let_go(once)
        packed = b"" if answer is None else zlib.compress(msgspec.msgpack.encode(answer), 1)
        try:
            await self._keep(keys=list(once.names), args=[once.call, packed, IDEMPOTENCY_TTL_SECONDS, MAX_TENANT_BYTES])
        except redis.RedisError as exc:  # the caller gets the answer all the same; the lease ends by itself
            log.warning("response_store_failed", error=str(exc))

    async def end(self, once: IdempotentCall) -> None:
        """Without an answer: forget it, or leave it to the next call."""
        self._let_go(once)
        try:
            if once.runs_on and not once.failed:
                await self._lease(keys=[once.names.record], args=[once.call, 0])
            else:
                await self._forget(keys=[once.names.record], args=[once.call])
        except redis.RedisError as exc:
            log.warning("idempotency_key_release_failed", error=str(exc))

    def _let_go(self, once: IdempotentCall) -> None:
        if self._held.get(once.names.record) is once:
            del self._held[once.names.record]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_MS / 3000)
            for once in list(self._held.values()):
                try:
                    await self._lease(keys=[once.names.record], args=[once.call, LEASE_MS])
                except redis.RedisError as exc:
                    log.warning("idempotency_key_renewal_failed", keys=len(self._held), error=str(exc))
                    break


def running() -> ApiError:
    return ApiError(CONFLICT, "The first request with this Idempotency-Key is still running.", retry_after=1)
