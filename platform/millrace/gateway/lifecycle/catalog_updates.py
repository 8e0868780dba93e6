"""Changes of the gateway's catalog while it runs: new deployments, new versions and removals.

The wanted deployments (inference_worker.contract.deployments) are read once a second, and less often while the gateway
rests (core.activity). A new version's tokenizer is loaded once a replica has prepared the model's files, also in the
prompt processes. Requests are routed to the new version once as many of its replicas are ready as of the old one, or as
many as are wanted. Requests that are already tokenized run on the old one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio as redis
import structlog

from inference_worker.contract.deployments import (
    ALL_WORKERS,
    WANTED_KEY,
    WantedDeployment,
    WantedDeployments,
    decode_wanted,
)
from inference_worker.contract.messages import (
    REPLICAS_KEY,
    Heartbeat,
    ReplicaPhase,
    beat_key,
    decode_heartbeat,
)
from inference_worker.contract.sampling_defaults import parse_sampling_defaults
from inference_worker.contract.settings import ModelSpec
from millrace.gateway.core.activity import Activity, Poll
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.catalog import DEFAULT_MAX_OUTPUT, ServedModel, load_catalog, load_served_model
from millrace.gateway.dispatch.replicas import ReplicaRegistry
from millrace.gateway.prompt_processes.prompt_pool import PromptPool

log = structlog.get_logger(__name__)

READ_SECONDS = 1.0
RETRY_SECONDS = 30.0  # after a tokenizer could not be loaded
PREPARED = (ReplicaPhase.READY, ReplicaPhase.DRAINING, ReplicaPhase.UNLOADED)  # the model's files are complete


async def read_catalog(broker: redis.Redis, specs: tuple[ModelSpec, ...], data_dir: Path) -> dict[str, ServedModel]:
    """Return the deployments that a starting gateway serves.

    These are the wanted deployments that have a replica or that the settings name too. If a version is not served yet,
    the version of a running replica is used. Without wanted deployments, those of the settings are used.
    """
    try:
        wanted, beats = await _read(broker), await _read_heartbeats(broker)
    except (redis.RedisError, OSError) as exc:
        log.warning("broker_unreachable", error=str(exc))
        wanted, beats = None, []
    if wanted is None:
        return dict(load_catalog(specs, data_dir))
    models: dict[str, ServedModel] = {}
    for each in wanted.deployments:
        running = [beat.spec for beat in beats if beat.model == each.spec.name and beat.phase in PREPARED and beat.spec]
        candidates = (
            [spec for spec in running if spec == each.spec] or running or [spec for spec in specs if spec == each.spec]
        )
        if candidates:
            try:
                model = load_served_model(candidates[0], data_dir, models.values())
            except Exception:  # the other deployments must not be affected
                log.exception("model_files_unreadable", model=each.spec.name)
                continue
            models[model.name] = _with_defaults(model, each)
    return models


class CatalogUpdater:
    """The task that changes the catalog of a running gateway."""

    def __init__(
        self,
        broker: redis.Redis,
        models: dict[str, ServedModel],
        loading: set[str],
        replicas: ReplicaRegistry,
        pool: PromptPool,
        data_dir: Path,
        activity: Activity | None = None,
    ) -> None:
        """Create an updater. It changes `models` and `loading`, which the router reads."""
        self._broker = broker
        self._models = models
        self._loading = loading
        self._replicas = replicas
        self._pool = pool
        self._data_dir = data_dir
        self._pauses = Poll(activity)
        self._next: dict[str, ServedModel] = {}  # name -> the version that replaces the current one
        self._retry_at: dict[str, float] = {}  # deployment key -> when its files are read again
        self._tasks: list[asyncio.Task[None]] = []
        self.wanted: WantedDeployments | None = None
        self.is_loaded = False  # whether the wanted deployments were read once

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)

    async def _run(self) -> None:
        while True:
            try:
                await self.update()
            except (redis.RedisError, OSError) as exc:
                log.warning("broker_unreachable", error=str(exc))
            except Exception:  # the deployments that are served must not be affected
                log.exception("catalog_update_failed")
            await self._pauses.pause(READ_SECONDS)

    async def update(self) -> None:
        """Read the wanted deployments, and change the catalog as far as the replicas allow."""
        self.wanted = await _read(self._broker) or self.wanted
        self.is_loaded = True
        if self.wanted is None:
            return
        for each in self.wanted.deployments:
            await self._update_one(each)
        names = {each.spec.name for each in self.wanted.deployments}
        for name in self._models.keys() - names:
            del self._models[name]
            log.info("deployment_removed", model=name)
        for name in self._next.keys() - names:
            del self._next[name]
        self._loading.clear()
        self._loading.update(names - self._models.keys())

    async def _update_one(self, each: WantedDeployment) -> None:
        name, key = each.spec.name, each.spec.key
        current = self._models.get(name)
        if current is not None and current.key == key:
            self._next.pop(name, None)
            if (changed := _with_defaults(current, each)) != current:
                self._models[name] = changed
                if changed.tokenization != current.tokenization:
                    self._replace_processes()
            return
        following = self._next.get(name)
        if following is None or following.key != key:
            if not self._replicas.is_prepared(key) or time.monotonic() < self._retry_at.get(key, 0.0):
                return
            if (following := await self._load(each)) is None:
                return
        if not self._pool.is_current:
            return
        ready = len(self._replicas.find_ready(key))
        if current is not None and ready < min(len(self._replicas.find_ready(current.key)), _most_replicas(each)):
            return
        self._models[name] = following
        del self._next[name]
        log.info("deployment_routed", model=name, version=following.version, replicas=ready)

    async def _load(self, each: WantedDeployment) -> ServedModel | None:
        """Load the tokenizer of a version, here and in the prompt processes. Return None if its files are wrong."""
        models = [*self._models.values(), *self._next.values()]
        try:
            model = await asyncio.to_thread(load_served_model, each.spec, self._data_dir, models)
        except Exception:  # the other deployments must not be affected
            log.exception("model_files_unreadable", model=each.spec.name)
            self._retry_at[each.spec.key] = time.monotonic() + RETRY_SECONDS
            return None
        gc.freeze()  # a tokenizer is never part of a cycle, and scanning it would pause the event loop
        model = self._next[each.spec.name] = _with_defaults(model, each)
        self._replace_processes()
        return model

    def _replace_processes(self) -> None:
        self._pool.replace_models([*self._models.values(), *self._next.values()])


def _most_replicas(each: WantedDeployment) -> int:
    """Return the wanted number of replicas; a number that is never reached if each worker of a pool has one."""
    counts = each.pools.values()
    return sys.maxsize if ALL_WORKERS in counts else sum(counts)


def _with_defaults(model: ServedModel, each: WantedDeployment) -> ServedModel:
    """Return the model with the deployment's options that do not belong to its version."""
    sampling = parse_sampling_defaults(each.sampling_defaults)
    return dataclasses.replace(
        model,
        default_max_output=each.default_max_tokens or DEFAULT_MAX_OUTPUT,
        sampling_defaults=model.checkpoint_sampling if sampling is None else sampling,
        truncates_inputs=each.truncate_inputs,
    )


async def _read(broker: redis.Redis) -> WantedDeployments | None:
    """Return the wanted deployments; None if they were never published or are invalid."""
    payload: Any = await broker.get(WANTED_KEY)
    if payload is None:
        return None
    try:
        return decode_wanted(payload)
    except (ValueError, msgspec.MsgspecError) as exc:
        log.warning("wanted_deployments_invalid", error=str(exc))
        return None


async def _read_heartbeats(broker: redis.Redis) -> list[Heartbeat]:
    """Return the heartbeats of the replicas that have sent one recently."""
    payloads: Any = await broker.hgetall(REPLICAS_KEY)
    found = []
    for replica_id, payload in payloads.items():
        if await broker.exists(beat_key(replica_id.decode())):
            try:
                found.append(decode_heartbeat(payload))
            except msgspec.MsgspecError:
                log.warning("heartbeat_unreadable", replica_id=replica_id.decode())
    return found
