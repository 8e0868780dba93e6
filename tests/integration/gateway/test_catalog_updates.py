"""Changes of a running gateway's catalog: new deployments, new versions and removals."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio as redis

from inference_worker.contract.deployments import WANTED_KEY, WantedDeployment, WantedDeployments, encode_wanted
from inference_worker.contract.messages import REPLICAS_KEY, Heartbeat, ReplicaPhase, beat_key, encode
from inference_worker.contract.settings import EMBEDDED_ENCODER, ModelSpec
from millrace.gateway.core.catalog import ServedModel, load_catalog, load_served_model
from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch.replicas import ReplicaRegistry
from millrace.gateway.lifecycle import catalog_updates
from millrace.gateway.lifecycle.catalog_updates import CatalogUpdater, read_catalog
from millrace.gateway.routing.router import Router
from tests.support.gateway.keys import make_key
from tests.support.models import models_data_dir

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

    def __init__(self, broker: redis.Redis, models: dict[str, ServedModel]) -> None:
        self.broker = broker
        self.models = models
        self.loading: set[str] = set()
        self.registry = ReplicaRegistry()
        self.pool = FakePool()
        self.router = Router(models, self.loading)
        pool: Any = self.pool
        self.updater = CatalogUpdater(broker, models, self.loading, self.registry, pool, models_data_dir())
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
async def fleet(broker: redis.Redis) -> Fleet:
    return Fleet(broker, dict(load_catalog([OLD], models_data_dir())))


async def test_a_new_version_is_routed_when_its_replicas_and_tokenizers_are_ready(fleet: Fleet) -> None:
    await fleet.want(NEW, replicas=2)
    await fleet.round(a=(OLD, ReplicaPhase.READY), b=(NEW, ReplicaPhase.LOADING))
    assert fleet.pool.keys == set()  # the worker has not prepared the files
    fleet.pool.is_current = False
    await fleet.round(b=(NEW, ReplicaPhase.READY))
    assert fleet.pool.keys == {OLD.key, NEW.key}
    assert fleet.models["m"].key == OLD.key
    fleet.pool.is_current = True
    await fleet.round(c=(OLD, ReplicaPhase.READY))
    assert fleet.models["m"].key == OLD.key  # fewer replicas than the old version
    await fleet.round(c=(NEW, ReplicaPhase.READY))
    assert fleet.models["m"].key == NEW.key
    assert fleet.router.find_served("m") is fleet.models["m"]


async def test_a_new_version_with_fewer_replicas_is_routed(fleet: Fleet) -> None:
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
    await fleet.want(broken, other)
    await fleet.round(a=(broken, ReplicaPhase.READY), b=(other, ReplicaPhase.READY))
    assert set(fleet.models) == {"other"}  # m was removed
    assert fleet.loading == {"broken"}
    assert set(await read_catalog(fleet.broker, (broken, other), models_data_dir())) == {"other"}


async def test_a_version_whose_load_fails_is_never_routed(fleet: Fleet) -> None:
    await fleet.want(replace(OLD, source="/does/not/exist"))
    for phase in (ReplicaPhase.LOADING, ReplicaPhase.FAILED):
        await fleet.round(a=(OLD, ReplicaPhase.READY), b=(replace(OLD, source="/does/not/exist"), phase))
        assert fleet.models["m"].key == OLD.key


async def test_deployments_are_added_and_removed(fleet: Fleet) -> None:
    other = ModelSpec("other", "embedded", "float32")
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
    fleet.models["e"] = load_served_model(encoder, models_data_dir())
    assert fleet.models["e"].truncates_inputs
    await fleet.want(encoder)
    await fleet.round(a=(encoder, ReplicaPhase.READY))
    assert fleet.pool.keys == set()
    await fleet.want(encoder, truncate_inputs=False, default_max_tokens=7)
    await fleet.round()
    assert not fleet.models["e"].truncates_inputs
    assert fleet.pool.keys == {encoder.key}


async def test_a_starting_gateway_serves_the_versions_of_running_replicas(broker: redis.Redis) -> None:
    data_dir, absent = models_data_dir(), ModelSpec("absent", "/does/not/exist", "auto")
    assert set(await read_catalog(broker, (OLD,), data_dir)) == {"m"}  # nothing was published yet
    fleet = Fleet(broker, {})
    await fleet.want(NEW, absent)
    assert await read_catalog(broker, (OLD,), data_dir) == {}
    await broker.hset(REPLICAS_KEY, "w-0.a", fleet._beat(OLD, ReplicaPhase.READY))  # type: ignore[misc]
    assert await read_catalog(broker, (OLD,), data_dir) == {}  # it has stopped
    await broker.set(beat_key("w-0.a"), "", px=5000)
    assert (await read_catalog(broker, (), data_dir))["m"].key == OLD.key
    await broker.hset(REPLICAS_KEY, "w-0.b", fleet._beat(NEW, ReplicaPhase.READY))  # type: ignore[misc]
    await broker.set(beat_key("w-0.b"), "", px=5000)
    assert (await read_catalog(broker, (), data_dir))["m"].key == NEW.key
    await fleet.want(OLD)
    assert (await read_catalog(broker, (OLD,), data_dir))["m"].key == OLD.key
