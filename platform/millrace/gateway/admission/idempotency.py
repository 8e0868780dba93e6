"""Idempotency keys on /v1: a repeated POST is executed and charged once, and receives the first call's response.
tenants.idempotency_rules has the rules that also apply to the management API.

For each key, Valkey stores a record with a hash of the request, the ID of the call that owns the record (`owner`), the
ID of the request that runs for it, and a lease that the owner's gateway renews. The response is stored before its last
byte is sent. Therefore:
- a different request with the same key is a conflict for a day;
- while the lease is valid, other calls are rejected and may retry later;
- if the owner left without a response (its client disconnected or its gateway failed), the next call takes over the
  record and resumes the running request from its log; if no request is running, it starts a new one.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec
import redis.asyncio as redis
import structlog

from inference_worker.contract.script_files import read_script
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import ApiError, invalid
from tenants import idempotency_rules as rules
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

LEASE_MS = 15_000
RETENTION_SECONDS = int(rules.RETENTION.total_seconds())
MAX_RESPONSE_BYTES = 2 * 2**20  # a longer response is not stored and not executed again
MAX_TENANT_BYTES = 64 * 2**20  # compressed responses of a tenant; the oldest are removed first

_LUA = Path(__file__).parent / "lua"
_BEGIN = read_script(_LUA / "begin_call.lua")
_LEASE = read_script(_LUA / "lease_call.lua")
_RESTART = read_script(_LUA / "restart_call.lua")
_FORGET = read_script(_LUA / "forget_call.lua")
_STORE = read_script(_LUA / "store_response.lua")


class StoredResponse(msgspec.Struct, frozen=True):
    """A response, as it was sent."""

    request_id: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Replay(Exception):
    """Raised if the call was made before. Carries its response."""

    def __init__(self, response: StoredResponse) -> None:
        super().__init__(response.request_id)
        self.response = response


class IdempotencyKeys(NamedTuple):
    """The Valkey keys of an idempotency key's record and response. All keys of a tenant are in one cluster slot."""

    record: str
    response: str
    by_age: str
    sum: str


class IdempotentCall:
    """A call with an idempotency key that owns the key's record."""

    def __init__(
        self, store: IdempotencyStore, valkey_keys: IdempotencyKeys, call_id: str, unfinished_request_id: str | None
    ) -> None:
        self._store = store
        self.valkey_keys = valkey_keys
        self.call_id = call_id
        self.unfinished_request_id = unfinished_request_id  # a request that an earlier call started and left
        self.keeps_running = False  # whether the request continues after its client disconnects, for the next call
        self.failed = False  # whether the response is an error, which is not stored
        self._is_over = False
        self._response: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._response_body: list[bytes] = []
        self._response_size = 0

    def record_start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Record the status and headers that were sent."""
        self._response = status, headers

    def record_body(self, body: bytes) -> None:
        """Record a part of the response's body that was sent."""
        self._response_size += len(body)
        if self._response_size <= MAX_RESPONSE_BYTES:
            self._response_body.append(body)
        else:
            self._response_body.clear()

    async def restart(self, request_id: str) -> None:
        """Start a new request for this call, since the earlier one no longer exists.

        Raises:
            ApiError: 409, another call has taken over the record.
        """
        if not await self._store.restart(self, request_id):
            raise still_running_error()
        self.unfinished_request_id = None

    async def store_response(self, request_id: str) -> None:
        """Store the complete response."""
        if self._response is None or self.failed or self._is_over:
            return
        self._is_over = True
        status, headers = self._response
        whole = b"".join(self._response_body) if self._response_size <= MAX_RESPONSE_BYTES else None
        await self._store.store_response(
            self, None if whole is None else StoredResponse(request_id, status, headers, whole)
        )

    async def end(self) -> None:
        """End the call, with or without a response. Can be called twice."""
        if not self._is_over:
            self._is_over = True
            await self._store.end(self)


class IdempotencyStore:
    """The idempotency records in Valkey, and the leases of this gateway's active calls."""

    def __init__(self, broker: redis.Redis) -> None:
        self._active: dict[str, IdempotentCall] = {}
        self._begin_script, self._lease_script, self._restart_script, self._forget_script, self._store_script = (
            broker.register_script(script) for script in (_BEGIN, _LEASE, _RESTART, _FORGET, _STORE)
        )
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._renewing = asyncio.create_task(self._renew())

    async def stop(self) -> None:
        if self._renewing is not None:
            await cancel_and_wait([self._renewing])

    async def begin(self, key: ApiKeySnapshot, name: bytes, fingerprint: bytes, request_id: str) -> IdempotentCall:
        """Take or resume the record of an idempotency key.

        Args:
            fingerprint: the hash that identifies the call.

        Raises:
            Replay: the call was made before.
            ApiError: 400, the key is invalid; 409, the call is still running, or the key was used for another call.
        """
        if not rules.is_valid_key(name):
            raise invalid(rules.KEY_HEADER, rules.INVALID_KEY)
        digest = hashlib.sha256(b"%d\0%s" % (key.key_id, name)).hexdigest()
        start = f"millrace:idempotency:{{{key.tenant_id}}}:"
        valkey_keys = IdempotencyKeys(f"{start}{digest}", f"{start}{digest}:answer", f"{start}by_age", f"{start}sum")
        state, *reply = await self._begin_script(
            keys=[valkey_keys.record, valkey_keys.response],
            args=[fingerprint, request_id, request_id, LEASE_MS, RETENTION_SECONDS],
        )
        if state == b"other":
            raise ApiError(rules.CONFLICT, rules.KEY_REUSED)
        if state == b"done":
            if not reply or reply[0] is None:
                raise ApiError(rules.CONFLICT, rules.RESPONSE_NOT_STORED)
            raise Replay(msgspec.msgpack.decode(zlib.decompress(reply[0]), type=StoredResponse))
        if state == b"running":
            raise still_running_error()
        call = IdempotentCall(self, valkey_keys, request_id, reply[0].decode() if state == b"left" else None)
        self._active[valkey_keys.record] = call
        return call

    async def restart(self, call: IdempotentCall, request_id: str) -> bool:
        return bool(await self._restart_script(keys=[call.valkey_keys.record], args=[call.call_id, request_id]))

    async def store_response(self, call: IdempotentCall, response: StoredResponse | None) -> None:
        self._release(call)
        packed = b"" if response is None else zlib.compress(msgspec.msgpack.encode(response), 1)
        try:
            await self._store_script(
                keys=list(call.valkey_keys), args=[call.call_id, packed, RETENTION_SECONDS, MAX_TENANT_BYTES]
            )
        except redis.RedisError as exc:  # the client still gets the response; the lease expires
            log.warning("response_store_failed", error=str(exc))

    async def end(self, call: IdempotentCall) -> None:
        """End a call without a stored response: remove its record, or leave it to the next call."""
        self._release(call)
        try:
            if call.keeps_running and not call.failed:
                await self._lease_script(keys=[call.valkey_keys.record], args=[call.call_id, 0])
            else:
                await self._forget_script(keys=[call.valkey_keys.record], args=[call.call_id])
        except redis.RedisError as exc:
            log.warning("idempotency_key_release_failed", error=str(exc))

    def _release(self, call: IdempotentCall) -> None:
        if self._active.get(call.valkey_keys.record) is call:
            del self._active[call.valkey_keys.record]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_MS / 3000)
            for call in list(self._active.values()):
                try:
                    await self._lease_script(keys=[call.valkey_keys.record], args=[call.call_id, LEASE_MS])
                except redis.RedisError as exc:
                    log.warning("idempotency_key_renewal_failed", keys=len(self._active), error=str(exc))
                    break


def still_running_error() -> ApiError:
    return ApiError(rules.CONFLICT, rules.STILL_RUNNING, retry_after=rules.RETRY_AFTER_SECONDS)
