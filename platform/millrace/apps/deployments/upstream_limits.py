"""The rate limits of upstreams, and the running requests of their credentials, as the relays share them in Valkey."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import redis
from django.conf import settings

from inference_worker.contract import valkey
from inference_worker.contract.upstream_limits import RateLimitState, leases_key, limits_key, read_state
from inference_worker.contract.upstreams import UpstreamSpec


@dataclass(frozen=True)
class UpstreamLimits:
    """The limits of an upstream for the credential of its deployment."""

    rate: RateLimitState
    running: int  # running requests with the credential, in all deployments; counted only if it has a concurrency limit


def read_upstream_limits(upstreams: Iterable[tuple[str, UpstreamSpec]]) -> dict[str, UpstreamLimits]:
    """Return the limits by deployment name, without deployments that have no credential.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    found = [(name, each, each.credential) for name, each in upstreams if each.credential is not None]
    if not found:
        return {}
    with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
        seconds, microseconds = _time(broker)
        now_ms = seconds * 1000 + microseconds // 1000
        with broker.pipeline(transaction=False) as pipe:
            for _, upstream, credential in found:
                pipe.hgetall(limits_key(upstream.base_url, upstream.model, credential))
                pipe.zcount(leases_key(credential), now_ms, "+inf")
            replies: list[Any] = pipe.execute()
    return {
        name: UpstreamLimits(read_state(fields, now_ms), int(running))
        for (name, _, _), fields, running in zip(found, replies[::2], replies[1::2], strict=True)
    }


def _time(broker: redis.Redis) -> tuple[int, int]:
    seconds, microseconds = broker.time()
    return int(seconds), int(microseconds)
