"""The wanted deployments: what workers load and gateways route, as the platform's catalog defines it.

The platform stores the complete list in one key, and repeats it once a minute. Workers read it twice a second, gateways
once, and compare it with what they have. So a lost, late or duplicate write is harmless.
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum

import msgspec

from inference_worker.contract.output_formats import AUTO
from inference_worker.contract.sampling_defaults import parse_sampling_defaults
from inference_worker.contract.settings import MODEL_NAME, ModelSpec

WANTED_KEY = "millrace:deployments"
MAX_DEPLOYMENTS = 256
ALL_WORKERS = 0  # replicas in a pool: one on each of its workers
SLOT_SECONDS = 15  # after this time without its worker, a slot is free for another one
DEMAND_SECONDS = 30  # how long a request for an unloaded deployment is remembered


class WantedState(StrEnum):
    """The state that an operator wants a deployment to have."""

    LOADED = "loaded"
    DRAINED = "drained"  # the weights stay, and no request is accepted
    UNLOADED = "unloaded"


class WantedDeployment(msgspec.Struct, frozen=True):
    """A deployment of the catalog, as workers and gateways need it."""

    spec: ModelSpec
    pools: dict[str, int]  # worker pool -> number of replicas, or ALL_WORKERS
    state: WantedState = WantedState.LOADED
    idle_seconds: int = 0  # after this time without requests the weights are dropped; 0: never
    default_max_tokens: int | None = None  # tokens of a response; None: the gateway's default
    sampling_defaults: str = AUTO  # an option that `parse_sampling_defaults` reads
    truncate_inputs: bool = True  # encoders: longer inputs are truncated if the request does not say

    def slots(self, pool: str) -> list[str]:
        """Return the names of the pool's slots, one for each replica; none if every worker has a replica."""
        return [f"{pool}/{self.spec.name}/{number}" for number in range(self.pools.get(pool, 0))]


class WantedDeployments(msgspec.Struct, frozen=True):
    """All deployments of the catalog."""

    deployments: tuple[WantedDeployment, ...]

    @property
    def version(self) -> str:
        """The identity of the list, for logs."""
        return hashlib.blake2b(_encode(self), digest_size=6).hexdigest()

    def find(self, name: str) -> WantedDeployment | None:
        return next((wanted for wanted in self.deployments if wanted.spec.name == name), None)


def slot_key(slot: str) -> str:
    return f"millrace:deployment_slot:{slot}"


def demand_key(name: str) -> str:
    """Return the key that exists while requests wait for an unloaded deployment."""
    return f"millrace:deployment_demand:{name}"


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WantedDeployments).decode


def encode_wanted(wanted: WantedDeployments) -> bytes:
    return _encode(wanted)


def decode_wanted(payload: bytes) -> WantedDeployments:
    """Decode and check the wanted deployments.

    Raises:
        ValueError: the payload is invalid.
    """
    wanted = _decode(payload)
    names = [each.spec.name for each in wanted.deployments]
    if len(names) > MAX_DEPLOYMENTS or len(set(names)) < len(names):
        raise ValueError("too many deployments, or two with one name")
    for each in wanted.deployments:
        if not re.fullmatch(MODEL_NAME, each.spec.name) or not each.spec.source:
            raise ValueError("a deployment has an invalid name or no source")
        if not all(0 <= replicas <= MAX_DEPLOYMENTS for replicas in each.pools.values()):
            raise ValueError(f"deployment {each.spec.name} has an invalid number of replicas")
        parse_sampling_defaults(each.sampling_defaults)
    return wanted
