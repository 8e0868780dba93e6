"""Changes of a running gateway's catalog: new deployments, new versions and removals."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis as sync_redis
import redis.asyncio as redis
from redis.typing import EncodableT, FieldT

from inference_worker.contract.deployments import WANTED_KEY, WantedDeployment, WantedDeployments, encode_wanted
from inference_worker.contract.messages import REPLICAS_KEY, Heartbeat, ReplicaPhase, beat_key, encode
from inference_worker.contract.model_bundles import bundle_key, manifest_key, read_manifest, sign_manifest
from inference_worker.contract.settings import EMBEDDED_ENCODER, ModelSpec
from millrace.gateway.core.bundle_store import BundleStore
from millrace.gateway.core.catalog import ServedModel, load_served_model
from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch.replicas import ReplicaRegistry
from millrace.gateway.lifecycle import catalog_updates
from millrace.gateway.lifecycle.catalog_updates import CatalogUpdater, read_catalog
from millrace.gateway.routing.router import Router
from tests.support.gateway.bundles import SECRET, load_models, make_publisher, publish_bundles
from tests.support.gateway.keys import make_key

OLD = ModelSpec("m", "embedded", "float32")
NEW = replace(OLD, revision="2")


class FakePool:
    """Prompt processes that have the models of the last replacement when `is_current` is set."""

    def __init__(self) -> None:
        self.is_current = True
        self.keys: set[str] = set()

    def replace_models(self, models: Iterable[ServedModel]) -> None:
        self.keys = {model.key for model in models}


class Fleet:
    """The wanted deployments and the replicas in Valkey, and a gateway's view of them."""

    def __init__(self, broker: redis.Redis, models: dict[str, ServedModel], data_dir: Path) -> None:
        self.broker = broker
        self.models = models
        self.loading: set[str] = set()
        self.registry = ReplicaRegistry()
        self.pool = FakePool()
        self.router = Router(models, self.loading)
        pool: Any = self.pool
        self.bundles = BundleStore(broker, data_dir, SECRET)
        self.updater = CatalogUpdater(broker, models, self.loading, self.registry, pool, self.bundles)
        self._phases: dict[str, tuple[ModelSpec, ReplicaPhase]] = {}

    async def want(self, *specs: ModelSpec, replicas: int = 1, **options: Any) -> None:
        deployments = tuple(WantedDeployment(spec, {"default": replicas}, **options) for spec in specs)
        await self.broker.set(WANTED_KEY, encode_wanted(WantedDeployments(deployments)))

    async def round(self, **phases: tuple[ModelSpec, ReplicaPhase]) -> None:
        """Change the phases of replicas, let the gateway see two heartbeats of each, and update the catalog."""
        self._phases |= phases
        for _ in range(2):
            beats = {f"w-0.{name}".encode(): self._beat(*each) for name, each in self._phases.items()}
            self.registry.update(beats)
        await self.updater.update()

    def _beat(self, spec: ModelSpec, phase: ReplicaPhase) -> bytes:
        is_ready = phase == ReplicaPhase.READY
        state: Any = {"version": spec.version, "spec": spec, "phase": phase}
        return encode(Heartbeat(time.time_ns(), spec.name, is_ready, False, 0, 0, 8, 10, 0, **state))


@pytest.fixture
async def fleet(broker: redis.Redis, tmp_path: Path) -> Fleet:
    publish_bundles([OLD])
    bundle = await BundleStore(broker, tmp_path, SECRET).find(OLD.key)
    assert bundle is not None
    return Fleet(broker, {"m": load_served_model(OLD, bundle)}, tmp_path)


async def test_a_new_version_is_routed_when_its_replicas_and_tokenizers_are_ready(fleet: Fleet) -> None:
    await fleet.want(NEW, replicas=2)
    await fleet.round(a=(OLD, ReplicaPhase.READY), b=(NEW, ReplicaPhase.LOADING))
    assert fleet.pool.keys == set()  # the worker has not published its bundle
    fleet.pool.is_current = False
    publish_bundles([NEW])
    await fleet.round()
    assert fleet.pool.keys == {OLD.key, NEW.key}  # while the weights are loaded
    await fleet.round(b=(NEW, ReplicaPhase.READY))
    assert fleet.models["m"].key == OLD.key
    fleet.pool.is_current = True
    await fleet.round(c=(OLD, ReplicaPhase.READY))
    assert fleet.models["m"].key == OLD.key  # fewer replicas than the old version
    await fleet.round(c=(NEW, ReplicaPhase.READY))
    assert fleet.models["m"].key == NEW.key
    assert fleet.router.find_served("m") is fleet.models["m"]


async def test_a_new_version_with_fewer_replicas_is_routed(fleet: Fleet) -> None:
    publish_bundles([NEW])
    await fleet.want(NEW)  # with one replica
    await fleet.round(a=(OLD, ReplicaPhase.READY), b=(OLD, ReplicaPhase.READY), c=(NEW, ReplicaPhase.READY))
    assert fleet.models["m"].key == NEW.key


async def test_an_error_of_one_deployment_does_not_affect_the_others(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_load(spec: ModelSpec, *args: Any) -> ServedModel:
        if spec.name == "broken":
            raise KeyError("chat_template")
        return load_served_model(spec, *args)

    monkeypatch.setattr(catalog_updates, "load_served_model", fail_to_load)
    broken, other = replace(OLD, name="broken"), replace(OLD, name="other")
    publish_bundles([broken, other])
    await fleet.want(broken, other)
    await fleet.round(a=(broken, ReplicaPhase.READY), b=(other, ReplicaPhase.READY))
    assert set(fleet.models) == {"other"}  # m was removed
    assert fleet.loading == {"broken"}
    assert fleet.updater.failures == {"broken": "'chat_template'"}
    assert set(await read_catalog(fleet.broker, (broken, other), fleet.bundles)) == {"other"}


async def test_a_version_whose_load_fails_is_never_routed(fleet: Fleet) -> None:
    await fleet.want(replace(OLD, source="/does/not/exist"))
    for phase in (ReplicaPhase.LOADING, ReplicaPhase.FAILED):
        await fleet.round(a=(OLD, ReplicaPhase.READY), b=(replace(OLD, source="/does/not/exist"), phase))
        assert fleet.models["m"].key == OLD.key


async def test_deployments_are_added_and_removed(fleet: Fleet) -> None:
    other = ModelSpec("other", "embedded", "float32")
    publish_bundles([other])
    await fleet.want(OLD, other, default_max_tokens=7, sampling_defaults="top_k=5")
    await fleet.round(a=(OLD, ReplicaPhase.READY), b=(other, ReplicaPhase.LOADING))
    assert fleet.models["m"].default_max_output == 7
    assert fleet.models["m"].sampling_defaults == (("top_k", 5),)
    with pytest.raises(ApiError) as error:
        fleet.router.measure(make_key(), "other")
    assert error.value.code == "model_loading"
    await fleet.round(b=(other, ReplicaPhase.READY))
    assert fleet.router.measure(make_key(), "other").key == other.key
    assert fleet.models["other"].tokenizer is fleet.models["m"].tokenizer  # of one directory
    await fleet.want(other)
    await fleet.round()
    assert set(fleet.models) == {"other"}
    await fleet.broker.delete(WANTED_KEY)  # Valkey lost its data
    await fleet.round()
    assert set(fleet.models) == {"other"}


async def test_a_change_of_the_truncation_reaches_the_prompt_processes(fleet: Fleet) -> None:
    encoder = ModelSpec("e", EMBEDDED_ENCODER, "auto")
    fleet.models |= load_models([encoder])
    assert fleet.models["e"].truncates_inputs
    await fleet.want(encoder)
    await fleet.round(a=(encoder, ReplicaPhase.READY))
    assert fleet.pool.keys == set()
    await fleet.want(encoder, truncate_inputs=False, default_max_tokens=7)
    await fleet.round()
    assert not fleet.models["e"].truncates_inputs
    assert fleet.pool.keys == {encoder.key}


async def test_a_starting_gateway_serves_the_versions_of_running_replicas(broker: redis.Redis, tmp_path: Path) -> None:
    fleet, absent = Fleet(broker, {}, tmp_path), ModelSpec("absent", "/does/not/exist", "auto")
    bundles = fleet.bundles
    assert await read_catalog(broker, (OLD,), bundles) == {}
    publish_bundles([OLD, NEW])
    assert set(await read_catalog(broker, (OLD,), bundles)) == {"m"}  # no deployments were published yet
    await fleet.want(NEW, absent)
    assert await read_catalog(broker, (OLD,), bundles) == {}
    await broker.hset(REPLICAS_KEY, "w-0.a", fleet._beat(OLD, ReplicaPhase.READY))
    assert await read_catalog(broker, (OLD,), bundles) == {}  # it has stopped
    await broker.set(beat_key("w-0.a"), "", px=5000)
    assert (await read_catalog(broker, (), bundles))["m"].key == OLD.key
    await broker.hset(REPLICAS_KEY, "w-0.b", fleet._beat(NEW, ReplicaPhase.READY))
    await broker.set(beat_key("w-0.b"), "", px=5000)
    assert (await read_catalog(broker, (), bundles))["m"].key == NEW.key
    await fleet.want(OLD)
    assert (await read_catalog(broker, (OLD,), bundles))["m"].key == OLD.key


async def test_a_second_start_needs_no_worker(broker: redis.Redis, tmp_path: Path) -> None:
    publish_bundles([OLD])
    (first,) = (await read_catalog(broker, (OLD,), BundleStore(broker, tmp_path, SECRET))).values()
    await broker.flushdb()
    (second,) = (await read_catalog(broker, (OLD,), BundleStore(broker, tmp_path, SECRET))).values()
    assert second.tokenizer.encode("Hello") == first.tokenizer.encode("Hello")
    assert (second.bundle, second.created) == (first.bundle, first.created)
    assert first.directory.is_relative_to(tmp_path)
    assert not list(first.directory.glob("*.safetensors"))
    async with redis.Redis.from_url("redis://127.0.0.1:1") as unreachable:
        assert set(await read_catalog(unreachable, (OLD,), BundleStore(unreachable, tmp_path, SECRET))) == {"m"}
    assert await read_catalog(broker, (OLD,), BundleStore(broker, tmp_path, "x" * 40)) == {}  # another secret


async def test_a_changed_file_on_disk_is_read_again(broker: redis.Redis, tmp_path: Path) -> None:
    publish_bundles([OLD])
    bundles = BundleStore(broker, tmp_path, SECRET)
    (model,) = (await read_catalog(broker, (OLD,), bundles)).values()
    path = model.directory / "tokenizer_config.json"
    content = path.read_bytes()
    path.write_bytes(content + b"\n")
    assert set(await read_catalog(broker, (OLD,), bundles)) == {"m"}
    assert path.read_bytes() == content
    path.write_bytes(b"{}")
    await broker.flushdb()
    assert await read_catalog(broker, (OLD,), bundles) == {}


@pytest.mark.parametrize("damage", ["unsigned", "large", "changed", "incomplete", "format", "other", "payload"])
async def test_a_refused_bundle_fails_its_deployment_only(fleet: Fleet, damage: str) -> None:
    bad, good = replace(OLD, name="bad", revision="2"), replace(OLD, name="good")
    publish_bundles([bad, good])
    await damage_bundle(fleet.broker, bad.key, damage)
    await fleet.want(bad, good)
    await fleet.round(a=(bad, ReplicaPhase.READY), b=(good, ReplicaPhase.READY))
    assert set(fleet.models) == {"good"}
    assert fleet.updater.failures.keys() == {"bad"}
    assert re.search(REASONS[damage], fleet.updater.failures["bad"])
    await fleet.broker.flushdb()
    publish_bundles([bad])
    await fleet.want(bad, good)
    await fleet.round(a=(bad, ReplicaPhase.READY))
    assert (set(fleet.models), fleet.updater.failures) == ({"bad", "good"}, {})


REASONS = {
    "unsigned": "is not signed with this gateway's MILLRACE_WORKER_SECRET",
    "large": "has 67108865 bytes; the limit is 67108864",
    "changed": "was changed in Valkey: the SHA-256 differs",
    "incomplete": "was changed in Valkey, or is incomplete",
    "format": "has the unknown format 2",
    "other": "that of another deployment",
    "payload": "the manifest of its bundle is of an unknown format",
}


async def damage_bundle(broker: redis.Redis, key: str, damage: str) -> None:
    """Damage the published bundle of a deployment, which no gateway has stored."""
    payload: Any = await broker.get(manifest_key(key))
    manifest = read_manifest(payload, key, SECRET)
    if damage in ("changed", "incomplete"):  # a bundle of its own, since a stored one is not read again
        content = b"".join([b"\x00" * size for size in manifest.chunk_sizes])
        manifest = msgspec.structs.replace(manifest, digest="0" * 64)
        sizes = enumerate(manifest.chunk_sizes)
        chunks: dict[FieldT, EncodableT] = {str(number): content[:size] for number, size in sizes}
        if damage == "incomplete":
            del chunks["0"]
        await broker.hset(bundle_key(manifest.digest), mapping=chunks)
    if damage == "large":
        manifest = msgspec.structs.replace(manifest, num_bytes=(64 << 20) + 1)
    if damage == "other":
        manifest = msgspec.structs.replace(manifest, deployment="another@1")
    signed = sign_manifest(manifest, "x" * 40 if damage == "unsigned" else SECRET, 2 if damage == "format" else 1)
    await broker.set(manifest_key(key), b"?" if damage == "payload" else signed)


async def test_other_files_of_a_served_version_replace_its_tokenizer(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.want(OLD)
    await fleet.round(a=(OLD, ReplicaPhase.READY))
    assert fleet.pool.keys == set()  # nothing changed
    other = tmp_path / "other"
    other.mkdir()
    for path in fleet.models["m"].directory.iterdir():
        shutil.copy(path, other)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with sync_redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as broker:
        make_publisher(broker).publish(OLD.key, other)
    first = fleet.models["m"].tokenizer
    await fleet.round()
    assert fleet.models["m"].tokenizer is not first
    assert fleet.models["m"].tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"
    await fleet.broker.set(manifest_key(OLD.key), b"?")
    await fleet.round()
    assert fleet.updater.failures.keys() == {"m"}
    assert set(fleet.models) == {"m"}  # with its last bundle
