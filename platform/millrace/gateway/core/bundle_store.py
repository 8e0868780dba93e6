"""Model bundles of a gateway: read from Valkey, where workers publish them, and stored in its data directory.

`bundles/<SHA-256>` has the files of a bundle, and `bundles/manifests/<deployment key>` the signed manifest of a
deployment. Both are checked whenever they are read. So a gateway that starts needs neither a model file nor a running
worker to tokenize prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio as redis
import structlog

from inference_worker.checkpoints.bundle_files import StoredBundle, find_bundle, store_bundle
from inference_worker.contract.model_bundles import (
    MAX_MANIFEST_BYTES,
    BundleManifest,
    BundleRefused,
    bundle_key,
    manifest_key,
    read_manifest,
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PublishedManifest:
    """A manifest in Valkey, with the result of its checks."""

    payload: bytes
    manifest: BundleManifest | None  # None: it is refused
    refusal: str = ""  # why

    @property
    def digest(self) -> str:
        """The SHA-256 of the bundle; empty if the manifest is refused."""
        return "" if self.manifest is None else self.manifest.digest


class BundleStore:
    """The bundles of deployments. Several gateways may use one data directory."""

    def __init__(self, broker: redis.Redis, data_dir: Path, worker_secret: str) -> None:
        self._broker = broker
        self._bundles = data_dir / "bundles"
        self._worker_secret = worker_secret
        self._published: dict[str, PublishedManifest] = {}  # by deployment key

    async def read_published(self, keys: Sequence[str]) -> dict[str, PublishedManifest]:
        """Return the published manifests by deployment key. An unchanged one is the same object as before.

        Raises:
            redis.RedisError, OSError: Valkey cannot be reached.
        """
        if not keys:
            return {}
        async with self._broker.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.getrange(manifest_key(key), 0, MAX_MANIFEST_BYTES - 1)
            found: list[bytes] = await pipe.execute()
        payloads = {key: payload for key, payload in zip(keys, found, strict=True) if payload}
        self._published = {key: self._check(key, payload) for key, payload in payloads.items()}
        return self._published

    def _check(self, key: str, payload: bytes) -> PublishedManifest:
        known = self._published.get(key)
        if known is not None and known.payload == payload:
            return known
        try:
            return PublishedManifest(payload, read_manifest(payload, key, self._worker_secret))
        except BundleRefused as exc:
            return PublishedManifest(payload, None, str(exc))

    async def fetch(self, key: str, published: PublishedManifest) -> StoredBundle:
        """Return the bundle of a published manifest. A bundle that is not stored yet is read from Valkey.

        Raises:
            BundleRefused: the bundle is too large, changed, not signed or of an unknown format.
            redis.RedisError: Valkey cannot be reached.
            OSError: the bundle cannot be stored.
        """
        manifest = published.manifest
        if manifest is None:
            raise BundleRefused(published.refusal)
        directory = await asyncio.to_thread(find_bundle, manifest.digest, self._bundles)
        if directory is None:
            content = await self._read_chunks(manifest)
            directory = await asyncio.to_thread(store_bundle, content, manifest.digest, self._bundles)
            log.info("bundle_stored", deployment=key, size=manifest.num_bytes)
        await asyncio.to_thread(self._store_manifest, key, published.payload)
        return StoredBundle(directory, manifest.digest, manifest.created)

    async def find(self, key: str) -> StoredBundle | None:
        """Return the published bundle of a deployment, or the stored one if none is published or it is refused."""
        with contextlib.suppress(redis.RedisError, OSError):
            published = (await self.read_published([key])).get(key)
            if published is not None:
                try:
                    return await self.fetch(key, published)
                except BundleRefused as exc:
                    log.warning("bundle_refused", deployment=key, error=str(exc))
        return await asyncio.to_thread(self._find_stored, key)

    async def _read_chunks(self, manifest: BundleManifest) -> bytes:
        """Read a bundle in chunks, whose sizes are checked first."""
        name, sizes = bundle_key(manifest.digest), manifest.chunk_sizes
        async with self._broker.pipeline(transaction=False) as pipe:
            for number in range(len(sizes)):
                pipe.hstrlen(name, str(number))
            if await pipe.execute() != sizes:
                raise BundleRefused("its bundle was changed in Valkey, or is incomplete: chunks have other sizes")
        chunks: list[bytes] = []
        for number in range(len(sizes)):  # one by one, since all of them could exceed the reply's timeout
            async with self._broker.pipeline(transaction=False) as pipe:
                pipe.hget(name, str(number))
                chunks += [chunk or b"" for chunk in await pipe.execute()]
        return b"".join(chunks)

    def _store_manifest(self, key: str, payload: bytes) -> None:
        path = self._bundles / "manifests" / key
        if not path.exists() or path.read_bytes() != payload:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{key}.{os.getpid()}")
            new.write_bytes(payload)
            new.replace(path)

    def _find_stored(self, key: str) -> StoredBundle | None:
        try:
            manifest = read_manifest((self._bundles / "manifests" / key).read_bytes(), key, self._worker_secret)
            directory = find_bundle(manifest.digest, self._bundles)
        except (OSError, BundleRefused):
            return None
        return None if directory is None else StoredBundle(directory, manifest.digest, manifest.created)
