"""What each gateway says of itself in the broker, for the operators' console: what it has in hand, and who waits.

`gateways` names them, `gateway:<id>` holds what one said last and is gone some seconds after its last word, so that no
clocks are compared.
"""

from __future__ import annotations

import msgspec
import redis.asyncio as redis

from inference_worker.contract.messages import encode
from tenants.outbox.change_feed import GATEWAYS_KEY as GATEWAYS_KEY
from tenants.outbox.change_feed import presence_key as presence_key

KEPT_SECONDS = 5


class Waiting(msgspec.Struct, frozen=True):
    """Requests of one model that no replica has a free place for."""

    model: str
    batch: bool  # of the batch class
    requests: int
    oldest_ms: int


class Presence(msgspec.Struct, frozen=True):
    """One gateway, twice a second."""

    in_flight: int
    waiting: tuple[Waiting, ...] = ()


decode_presence = msgspec.msgpack.Decoder(Presence).decode


def tell(pipe: redis.client.Pipeline, gateway_id: str, presence: Presence) -> None:
    """Queue the commands that say it."""
    pipe.sadd(GATEWAYS_KEY, gateway_id)
    pipe.set(presence_key(gateway_id), encode(presence), ex=KEPT_SECONDS)
