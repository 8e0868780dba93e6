"""Heartbeats of gateways in Valkey, for the operators' console: running and waiting requests.

`millrace:gateways` is the set of gateway IDs, `millrace:gateway_heartbeat:<id>` the last heartbeat of one. That key
expires some seconds after the gateway's last heartbeat, so that no clocks are compared.
"""

from __future__ import annotations

import msgspec
import redis.asyncio as redis

from inference_worker.contract.messages import encode
from millrace.environment.host_reports import HostReport
from tenants.outbox.change_feed import GATEWAYS_KEY as GATEWAYS_KEY
from tenants.outbox.change_feed import gateway_heartbeat_key as gateway_heartbeat_key

GATEWAY_HEARTBEAT_TTL_SECONDS = 5


class QueueDepth(msgspec.Struct, frozen=True):
    """Waiting requests of a model, for which no replica has capacity."""

    model: str
    batch: bool  # whether they are of the batch class
    requests: int
    oldest_ms: int


class HitRate(msgspec.Struct, frozen=True):
    """The predicted minus the real cache hit rate of a replica's last requests."""

    replica: str
    model: str
    requests: int
    difference: float


class GatewayHeartbeat(msgspec.Struct, frozen=True):
    """The heartbeat that a gateway sends twice a second, and at rest every two seconds."""

    in_flight: int
    waiting: tuple[QueueDepth, ...] = ()
    hit_rates: tuple[HitRate, ...] = ()
    failures: dict[str, str] = {}  # deployments whose model bundle the gateway cannot load, each with the reason
    host: HostReport | None = None  # state of the gateway's machine; None: unknown yet, or an earlier release


decode_gateway_heartbeat = msgspec.msgpack.Decoder(GatewayHeartbeat).decode


def send_gateway_heartbeat(pipe: redis.client.Pipeline, gateway_id: str, presence: GatewayHeartbeat) -> None:
    """Add the commands of a heartbeat to the pipeline."""
    pipe.sadd(GATEWAYS_KEY, gateway_id)
    pipe.set(gateway_heartbeat_key(gateway_id), encode(presence), ex=GATEWAY_HEARTBEAT_TTL_SECONDS)
