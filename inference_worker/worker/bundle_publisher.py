"""The model bundles of a worker process in Valkey (inference_worker.contract.model_bundles)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import redis
import structlog

from inference_worker.checkpoints.bundle_files import pack_bundle
from inference_worker.contract.messages import HEARTBEAT_SECONDS, ReplicaPhase
from inference_worker.contract.model_bundles import (
    BUNDLE_TTL_SECONDS,
    MAX_MANIFEST_BYTES,
    BundleManifest,
    BundleRefused,
    bundle_key,
    hash_bundle,
    manifest_key,
    read_manifest,
    sign_manifest,
)
from inference_worker.contract.settings import ModelSpec
from inference_worker.worker.periodic_thread import PeriodicThread
from inference_worker.worker.reconciler import FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS
from inference_worker.worker.replica import LocalReplica

log = structlog.get_logger(__name__)

RENEW_SECONDS = 5.0


class _PublishedBundle(NamedTuple):
    """A bundle of this process."""

    directory: Path  # the directory of the model
    manifest: BundleManifest
    signed: bytes


class BundlePublisher:
    """Publishes the bundles of the process's replicas, and the thread that renews them. Thread-safe."""

    def __init__(
        self,
        broker: redis.Redis,
        worker_secret: str,
        replicas: Callable[[], Collection[LocalReplica]],
        find_directory: Callable[[ModelSpec], Path],
        on_demand: Collection[ModelSpec] = (),
    ) -> None:
        """Create a publisher.

        Args:
            find_directory: returns the model directory of a deployment.
            on_demand: deployments whose bundles are published at the start, before they have a replica.
        """
        self._broker = broker
        self._worker_secret = worker_secret
        self._replicas = replicas
        self._find_directory = find_directory
        self._on_demand = on_demand
        self._published: dict[str, _PublishedBundle] = {}  # by deployment key
        self._is_first_step = True
        self._renew_at = 0.0  # monotonic time
        self._thread = PeriodicThread("bundles", self._step, HEARTBEAT_SECONDS)

    def start(self) -> None:
        """Start the thread, unless it was started before."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. The bundles remain in Valkey until they expire."""
        self._thread.close()

    def publish(self, key: str, directory: Path) -> str:
        """Publish the bundle of a deployment, and return its SHA-256. If Valkey is unreachable, the thread repeats it.

        Raises:
            ModelError: the bundle is too large, or a file cannot be read.
        """
        payload = pack_bundle(directory)
        created = int((directory / "config.json").stat().st_mtime)
        manifest = BundleManifest(key, hash_bundle(payload), len(payload), created)
        published = _PublishedBundle(directory, manifest, sign_manifest(manifest, self._worker_secret))
        self._published[key] = published
        try:
            self._store(published, payload)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
        return manifest.digest

    def publish_on_demand(self) -> None:
        """Publish the bundles of replicas that have never been loaded. An error becomes the reason of a failed load."""
        for replica in self._replicas():
            is_unloaded = replica.phase == ReplicaPhase.UNLOADED and replica.spec.upstream is None
            if not is_unloaded or replica.spec.key in self._published:
                continue
            try:
                self.publish(replica.spec.key, self._find_directory(replica.spec))
            except Exception as exc:
                log.exception("bundle_unpublished", model=replica.spec.name)
                replica.fail_load(str(exc)[:500], FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS)

    def renew(self) -> None:
        """Renew the bundles of this process, and publish those again whose manifest or chunks Valkey has lost.

        Raises:
            redis.RedisError: Valkey cannot be reached.
        """
        known = list(self._published.items())  # first, since a replica precedes its bundle
        wanted = {replica.spec.key for replica in self._replicas()} | {spec.key for spec in self._on_demand}
        for key, published in known:
            if key not in wanted:
                del self._published[key]
            elif not self._extend(published):
                self._store_again(published)

    def _extend(self, published: _PublishedBundle) -> bool:
        """Renew a bundle and its manifest. Return whether Valkey has both.

        The manifest may be that of another worker, whose files differ. The last one applies.
        """
        manifest = published.manifest
        name = manifest_key(manifest.deployment)
        with self._broker.pipeline(transaction=False) as pipe:
            pipe.expire(bundle_key(manifest.digest), BUNDLE_TTL_SECONDS)
            pipe.expire(name, BUNDLE_TTL_SECONDS)
            pipe.getrange(name, 0, MAX_MANIFEST_BYTES - 1)
            has_bundle, _, stored = pipe.execute()
        try:
            read_manifest(stored, manifest.deployment, self._worker_secret)
        except BundleRefused:
            return False
        return bool(has_bundle)

    def _store_again(self, published: _PublishedBundle) -> None:
        payload = pack_bundle(published.directory)
        if hash_bundle(payload) == published.manifest.digest:
            self._store(published, payload)
        else:  # the engine has loaded the earlier files
            log.warning("model_files_changed", directory=str(published.directory))

    def _store(self, published: _PublishedBundle, payload: bytes) -> None:
        """Write the chunks that Valkey does not have, and then the manifest."""
        manifest = published.manifest
        name, sizes = bundle_key(manifest.digest), manifest.chunk_sizes
        if self._broker.hlen(name) != len(sizes):
            start = 0
            for number, size in enumerate(sizes):  # one by one, so that Valkey serves other clients in between
                with self._broker.pipeline(transaction=False) as pipe:
                    pipe.hset(name, str(number), payload[start : start + size])
                    pipe.expire(name, BUNDLE_TTL_SECONDS)
                    pipe.execute()
                start += size
        with self._broker.pipeline(transaction=False) as pipe:
            pipe.expire(name, BUNDLE_TTL_SECONDS)
            pipe.set(manifest_key(manifest.deployment), published.signed, ex=BUNDLE_TTL_SECONDS)
            pipe.execute()
        log.info("bundle_published", deployment=manifest.deployment, size=manifest.num_bytes)

    def _publish_first(self) -> None:
        """Publish the bundles of models on demand while another model is loaded, so that gateways read all together.

        Their files may be converted first. An error is repeated, and reported, when the model has a replica.
        """
        for spec in self._on_demand:
            try:
                self.publish(spec.key, self._find_directory(spec))
            except Exception as exc:  # noqa: BLE001 - the model that is loaded must not be affected
                log.warning("bundle_unpublished", model=spec.name, error=str(exc))

    def _step(self) -> None:
        if self._is_first_step:
            self._is_first_step = False
            self._publish_first()
        self.publish_on_demand()
        if time.monotonic() >= self._renew_at:
            self.renew()
            self._renew_at = time.monotonic() + RENEW_SECONDS
