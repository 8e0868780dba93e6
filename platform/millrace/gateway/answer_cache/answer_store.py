"""Cached answers in Valkey, encrypted, and the flights of requests that are being computed.

Each change is one script. The answer, its place in the tenant's index and the end of its flight are written together.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import redis.asyncio as redis

from inference_worker.contract.messages import AnswerEvent
from inference_worker.contract.script_files import read_script
from millrace.apps.answer_caches.answer_keys import answer_key, flight_key, index_key
from millrace.gateway.answer_cache.answer_cipher import AnswerCipher

if TYPE_CHECKING:
    pass

MAX_ANSWER_BYTES = 64 * 1024  # a longer answer is not stored
MAX_TENANT_ANSWERS = 2000  # the answer that expires first makes room for a new one

_LUA = Path(__file__).parent / "lua"
_FIND = read_script(_LUA / "find_answer.lua")
_STORE = read_script(_LUA / "store_answer.lua")
_SUCCEED = read_script(_LUA / "succeed_leader.lua")


class CachedAnswer(msgspec.Struct, frozen=True):
    """The events of a completed request. Its usage is in the last event."""

    request_id: str
    stored_at: int  # Unix seconds
    events: list[AnswerEvent]


encode_answer = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CachedAnswer).decode


def decode_answer(payload: bytes) -> CachedAnswer | None:
    """Return the answer; None if it is unreadable."""
    try:
        return _decode(payload)
    except (msgspec.MsgspecError, ValueError):
        return None


class AnswerStore:
    """The cached answers of all tenants, and the flights."""

    def __init__(self, broker: redis.Redis, secret: str, flight_seconds: int) -> None:
        """Create a store. `flight_seconds` is the longest time that a request runs."""
        self._broker = broker
        self.cipher = AnswerCipher(secret)
        self._flight_ms = flight_seconds * 1000
        self._find = broker.register_script(_FIND)
        self._store = broker.register_script(_STORE)
        self._succeed = broker.register_script(_SUCCEED)

    def answer_id(self, parts: object) -> str:
        """Return the identity of the answer to a request with these parts."""
        return self.cipher.digest(b"answer\0" + encode_answer(parts)).hex()

    async def find(self, tenant_id: int, answer_id: str, leader: str) -> tuple[CachedAnswer | None, str]:
        """Return the cached answer, or else the leader of its flight.

        Args:
            leader: the leader of a new flight if there is none; empty: no flight starts.

        Raises:
            redis.RedisError: Valkey is unavailable.
        """
        keys = [answer_key(tenant_id, answer_id), flight_key(tenant_id, answer_id)]
        reply: Any = await self._find(keys=keys, args=[leader, self._flight_ms])
        payload, current = reply
        if not payload:
            return None, current.decode()
        answer = self._open(tenant_id, answer_id, payload)
        return answer, "" if answer is not None else leader

    async def store(self, tenant_id: int, answer_id: str, leader: str, answer: CachedAnswer, seconds: int) -> None:
        """Store an answer, unless it is too long, and end its flight."""
        payload = encode_answer(answer)
        fits = len(payload) <= MAX_ANSWER_BYTES
        await self._end_flight(
            tenant_id, answer_id, leader, self._seal(tenant_id, answer_id, payload) if fits else b"", seconds
        )

    async def end_flight(self, tenant_id: int, answer_id: str, leader: str) -> None:
        """End the leader's flight without an answer."""
        await self._end_flight(tenant_id, answer_id, leader, b"", 0)

    async def is_leader(self, tenant_id: int, answer_id: str, leader: str) -> bool:
        """Return whether the answer's flight has this leader."""
        current: Any = await self._broker.get(flight_key(tenant_id, answer_id))
        return current is not None and current.decode() == leader

    async def succeed(self, tenant_id: int, answer_id: str, leader: str, successor: str) -> str:
        """Replace a leader that failed. Return the leader of the flight, which may be another follower."""
        keys = [flight_key(tenant_id, answer_id)]
        reply: Any = await self._succeed(keys=keys, args=[leader, successor, self._flight_ms])
        return str(reply.decode())

    async def _end_flight(self, tenant_id: int, answer_id: str, leader: str, payload: bytes, seconds: int) -> None:
        keys = [answer_key(tenant_id, answer_id), flight_key(tenant_id, answer_id), index_key(tenant_id)]
        await self._store(keys=keys, args=[leader, payload, seconds, time.time(), MAX_TENANT_ANSWERS])

    def _seal(self, tenant_id: int, answer_id: str, payload: bytes) -> bytes:
        return self.cipher.seal(tenant_id, answer_id.encode(), payload)

    def _open(self, tenant_id: int, answer_id: str, sealed: bytes) -> CachedAnswer | None:
        """Return the decrypted answer; None if it is of another secret or unreadable."""
        payload = self.cipher.open(tenant_id, answer_id.encode(), sealed)
        return None if payload is None else decode_answer(payload)
