"""The models that `millrace up` names at its start, since they have a slower backend than the machine's default."""

from __future__ import annotations

from typing import Any

import msgspec
import redis

from inference_worker.contract import valkey
from inference_worker.contract.compute_support import SlowReason
from inference_worker.contract.messages import REPLICAS_KEY, decode_heartbeat


def find_slow_models(valkey_url: str) -> dict[str, SlowReason]:
    """Return the reasons by model, from the last heartbeats of the loaded replicas.

    Without a connection to Valkey, there are none.
    """
    try:
        with valkey.connect(valkey_url, valkey.PAGES) as broker:
            payloads: Any = broker.hvals(REPLICAS_KEY)
    except redis.RedisError:
        return {}
    found = {}
    for payload in payloads:
        try:
            beat = decode_heartbeat(payload)
        except msgspec.MsgspecError:  # of another version
            continue
        if beat.machine is not None and beat.machine.slow is not None:
            found[beat.model] = beat.machine.slow
    return found
