"""What each gateway says of itself in the broker, for the operators' console: what it has in hand, and who waits.

`millrace:gateways` names them, `millrace:gateway_heartbeat:<id>` holds what one said last. That
key is gone some seconds after the gateway's last heartbeat, so that no clocks are compared.
"""

from __future__ import annotations

import msgspec
import redis.asyncio as redis

from inference_worker.contract.messages import encode
from tenants.outbox.change_feed import GATEWAYS_KEY as GATEWAYS_KEY
from tenants.outbox.change_feed import gateway_heartbeat_key as gateway_heartbeat_key

GATEWAY_HEARTBEAT_TTL_SECONDS = 5


class QueueDepth(msgspec.Struct, frozen=True):
    """Requests of one model that no replica has a free place for."""

    model: str
    batch: bool  # of the batch class
    requests: int
    oldest_ms: int


class GatewayHeartbeat(msgspec.Struct, frozen=True):
    """One gateway, twice a second."""

    in_flight: int
    waiting: tuple[QueueDepth, ...] = ()


decode_gateway_heartbeat = msgspec.msgpack.Decoder(GatewayHeartbeat).decode


def send_gateway_heartbeat(pipe: redis.client.Pipeline, gateway_id: str, presence: GatewayHeartbeat) -> None:
    """Queue the commands that say it."""
    pipe.sadd(GATEWAYS_KEY, gateway_id)
    pipe.set(gateway_heartbeat_key(gateway_id), encode(presence), ex=GATEWAY_HEARTBEAT_TTL_SECONDS)
