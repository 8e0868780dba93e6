"""Changes of the gateway's catalog while it runs: new deployments, new versions and removals.

The wanted deployments (inference_worker.contract.deployments) are read once a second, and less often while the gateway
rests (core.activity). A new version's tokenizer is loaded once a worker has published the model's bundle, also in the
prompt processes. Requests are routed to the new version once as many of its replicas are ready as of the old one, or as
many as are wanted. Requests that are already tokenized run on the old one.

A bundle that is refused makes its deployment fail. The reason is in the gateway's heartbeat until a worker publishes
another manifest. A deployment that is served keeps its last bundle.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import sys
import time
from collections.abc import Iterable
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
from inference_worker.contract.model_bundles import BundleRefused
from inference_worker.contract.sampling_defaults import parse_sampling_defaults
from inference_worker.contract.settings import ModelSpec
from millrace.gateway.core.activity import Activity, Poll
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.bundle_store import BundleStore, PublishedManifest
from millrace.gateway.core.catalog import DEFAULT_MAX_OUTPUT, ServedModel, load_served_model, upstream_model
from millrace.gateway.dispatch.replicas import ReplicaRegistry
from millrace.gateway.prompt_processes.prompt_pool import PromptPool

log = structlog.get_logger(__name__)

READ_SECONDS = 1.0
LOADING_READ_SECONDS = 0.25  # while a deployment is not served yet
RETRY_SECONDS = 30.0  # after a bundle or a tokenizer could not be loaded
MAX_REASON_CHARACTERS = 500
PREPARED = (ReplicaPhase.READY, ReplicaPhase.DRAINING, ReplicaPhase.UNLOADED)  # the model's files are complete


async def read_catalog(
    broker: redis.Redis, specs: tuple[ModelSpec, ...], bundles: BundleStore
) -> dict[str, ServedModel]:
    """Return the deployments that a starting gateway serves.

    These are the wanted deployments that have a replica or that the settings name too. If a version is not served yet,
    the version of a running replica is used. Without wanted deployments, those of the settings are used. Deployments
    whose bundle is neither published nor stored follow later.
    """
    try:
        wanted, beats = await _read(broker), await _read_heartbeats(broker)
    except (redis.RedisError, OSError) as exc:
        log.warning("broker_unreachable", error=str(exc))
        wanted, beats = None, []
    models: dict[str, ServedModel] = {}
    for each in (wanted or _list_configured(specs)).deployments:
        running = [beat.spec for beat in beats if beat.model == each.spec.name and beat.phase in PREPARED and beat.spec]
        candidates = (
            [spec for spec in running if spec == each.spec] or running or [spec for spec in specs if spec == each.spec]
        )
        if candidates:
            try:
                model = await _load_available(candidates[0], bundles, models.values())
            except Exception:  # the other deployments must not be affected
                log.exception("model_files_unreadable", model=each.spec.name)
                continue
            if model is not None:
                models[model.name] = _with_defaults(model, each)
    return models


async def _load_available(spec: ModelSpec, bundles: BundleStore, others: Iterable[ServedModel]) -> ServedModel | None:
    """Return a deployment, or None if its bundle is neither published nor stored."""
    if spec.upstream is not None:
        return upstream_model(spec.name, spec.version, spec.upstream)
    bundle = await bundles.find(spec.key)
    return None if bundle is None else load_served_model(spec, bundle, others)


def _list_configured(specs: Iterable[ModelSpec]) -> WantedDeployments:
    """Return the wanted deployments if none were published: those of the settings."""
    return WantedDeployments(tuple(WantedDeployment(spec, {}) for spec in specs))


class CatalogUpdater:
    """The task that changes the catalog of a running gateway."""

    def __init__(
        self,
        broker: redis.Redis,
        models: dict[str, ServedModel],
        loading: set[str],
        replicas: ReplicaRegistry,
        pool: PromptPool,
        bundles: BundleStore,
        specs: tuple[ModelSpec, ...] = (),
        activity: Activity | None = None,
    ) -> None:
        """Create an updater. It changes `models` and `loading`, which the router reads.

        Args:
            specs: of the settings, which are wanted until deployments are published.
        """
        self._broker = broker
        self._models = models
        self._loading = loading
        self._replicas = replicas
        self._pool = pool
        self._bundles = bundles
        self._specs = specs
        self._pauses = Poll(activity)
        self._next: dict[str, ServedModel] = {}  # name -> the version that replaces the current one
        # Deployment key -> the manifest that failed, and when it is read again.
        self._failed: dict[str, tuple[PublishedManifest | None, float]] = {}
        self.failures: dict[str, str] = {}  # name -> why the wanted version cannot be loaded
        self._tasks: list[asyncio.Task[None]] = []
        self.wanted: WantedDeployments | None = None
        self.is_loaded = False  # whether the wanted deployments were read and tried once

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
            await self._pauses.pause(LOADING_READ_SECONDS if self._loading else READ_SECONDS)

    async def update(self) -> None:
        """Read the wanted deployments, and change the catalog as far as the replicas allow."""
        self.wanted = await _read(self._broker) or self.wanted
        wanted = self.wanted or _list_configured(self._specs)
        own = [each.spec.key for each in wanted.deployments if each.spec.upstream is None]
        published = await self._bundles.read_published(own)
        loads = [await self._load_wanted(each, published.get(each.spec.key)) for each in wanted.deployments]
        if any(loads):
            self._replace_processes()
        for each in wanted.deployments:
            self._route(each)
        names = {each.spec.name for each in wanted.deployments}
        for name in self._models.keys() - names:
            del self._models[name]
            log.info("deployment_removed", model=name)
        for name in self._next.keys() - names:
            del self._next[name]
        for name in self.failures.keys() - names:
            del self.failures[name]
        self._loading.clear()
        self._loading.update(names - self._models.keys())
        self.is_loaded = True

    async def _load_wanted(self, each: WantedDeployment, published: PublishedManifest | None) -> bool:
        """Load the wanted version of a deployment if it is new. Return whether it was loaded."""
        name, key = each.spec.name, each.spec.key
        loaded = [model for model in (self._next.get(name), self._models.get(name)) if model and model.key == key]
        if not self._is_loadable(each, published, loaded[0] if loaded else None):
            return False
        try:
            model = await self._load(each, published)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            return False
        except Exception as exc:  # the other deployments must not be affected
            log.warning("bundle_refused", model=name, error=str(exc), exc_info=not isinstance(exc, BundleRefused))
            self.failures[name] = (str(exc) or type(exc).__name__)[:MAX_REASON_CHARACTERS]
            self._failed[key] = published, time.monotonic() + RETRY_SECONDS
            return False
        self.failures.pop(name, None)
        gc.freeze()  # a tokenizer is never part of a cycle, and scanning it would pause the event loop
        self._next[name] = _with_defaults(model, each)
        return True

    def _is_loadable(
        self, each: WantedDeployment, published: PublishedManifest | None, loaded: ServedModel | None
    ) -> bool:
        """Return whether the wanted version, or another bundle of it than the loaded one, is to be loaded now."""
        name, key = each.spec.name, each.spec.key
        if each.spec.upstream is not None:
            is_new = loaded is None and self._replicas.is_prepared(key)
        else:
            is_new = published is not None and (loaded is None or loaded.bundle != published.digest)
        if not is_new:
            self.failures.pop(name, None)
            return False
        failed, retry_at = self._failed.get(key, (None, 0.0))
        return failed != published or time.monotonic() >= retry_at

    async def _load(self, each: WantedDeployment, published: PublishedManifest | None) -> ServedModel:
        """Load the tokenizer of a version.

        Raises:
            BundleRefused, ModelError, ValueError, OSError: it cannot be loaded.
            redis.RedisError: Valkey cannot be reached.
        """
        if each.spec.upstream is not None:
            return upstream_model(each.spec.name, each.spec.version, each.spec.upstream)
        if published is None:
            raise AssertionError("only published bundles are loaded")
        bundle = await self._bundles.fetch(each.spec.key, published)
        models = [*self._models.values(), *self._next.values()]
        return await asyncio.to_thread(load_served_model, each.spec, bundle, models)

    def _route(self, each: WantedDeployment) -> None:
        """Route requests to the wanted version of a deployment, if its tokenizers and replicas are ready."""
        name, key = each.spec.name, each.spec.key
        current, following = self._models.get(name), self._next.get(name)
        if following is None or following.key != key:
            if current is not None and current.key == key:
                self._next.pop(name, None)
                self._change_defaults(current, each)
            return
        if not self._pool.is_current or not self._replicas.is_prepared(key):
            return
        ready = len(self._replicas.find_ready(key))
        if current is not None and ready < min(len(self._replicas.find_ready(current.key)), _most_replicas(each)):
            return
        self._models[name] = following
        del self._next[name]
        log.info("deployment_routed", model=name, version=following.version, replicas=ready)

    def _change_defaults(self, current: ServedModel, each: WantedDeployment) -> None:
        if (changed := _with_defaults(current, each)) != current:
            self._models[each.spec.name] = changed
            if changed.tokenization != current.tokenization:
                self._replace_processes()

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
