"""Model bundles that a worker publishes in Valkey."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from inference_worker.checkpoints import bundle_files
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.messages import ReplicaPhase
from inference_worker.contract.model_bundles import (
    BUNDLE_TTL_SECONDS,
    BundleManifest,
    bundle_key,
    hash_bundle,
    manifest_key,
    read_manifest,
)
from inference_worker.contract.settings import ModelSpec
from inference_worker.worker.replica import LocalReplica
from tests.support.gateway.bundles import SECRET, make_publisher
from tests.support.models import models_data_dir

SPEC = ModelSpec("m", "embedded", "auto")
OTHER = replace(SPEC, name="other")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Copy the files of the embedded model, without its weights."""
    source, target = ensure_model(SPEC, models_data_dir()), tmp_path / "model"
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
    return target


def published(broker: redis.Redis, spec: ModelSpec = SPEC) -> BundleManifest | None:
    payload: Any = broker.get(manifest_key(spec.key))
    return None if payload is None else read_manifest(payload, spec.key, SECRET)


def chunks(broker: redis.Redis, digest: str) -> list[bytes]:
    found: Any = broker.hgetall(bundle_key(digest))
    return [found[str(number).encode()] for number in range(len(found))]


def seconds_left(broker: redis.Redis, key: str) -> int:
    seconds: Any = broker.ttl(key)
    return int(seconds)


def test_a_bundle_is_published_in_chunks_and_expires(broker: redis.Redis, directory: Path) -> None:
    digest = make_publisher(broker).publish(SPEC.key, directory)
    manifest = published(broker)
    assert manifest is not None
    stored = chunks(broker, digest)
    assert manifest.digest == digest == hash_bundle(b"".join(stored))
    assert [len(chunk) for chunk in stored] == manifest.chunk_sizes
    assert len(stored) > 1
    for key in (manifest_key(SPEC.key), bundle_key(digest)):
        assert 0 < seconds_left(broker, key) <= BUNDLE_TTL_SECONDS


def test_deployments_of_one_model_share_a_bundle(broker: redis.Redis, directory: Path) -> None:
    publisher = make_publisher(broker)
    assert publisher.publish(SPEC.key, directory) == publisher.publish(OTHER.key, directory)
    assert len(list(broker.scan_iter(bundle_key("*")))) == 1
    assert published(broker, OTHER)


def test_a_lost_or_damaged_bundle_is_published_again(broker: redis.Redis, directory: Path) -> None:
    replica = LocalReplica("w-0.a-1", SPEC)
    publisher = make_publisher(broker, lambda: [replica])
    digest = publisher.publish(SPEC.key, directory)
    first = published(broker)
    for damage in (
        broker.flushdb,
        lambda: broker.delete(bundle_key(digest)),
        lambda: broker.delete(manifest_key(SPEC.key)),
        lambda: broker.set(manifest_key(SPEC.key), b"?"),
    ):
        damage()
        publisher.renew()
        assert published(broker) == first
        assert hash_bundle(b"".join(chunks(broker, digest))) == digest
    broker.expire(manifest_key(SPEC.key), 5)
    publisher.renew()
    assert seconds_left(broker, manifest_key(SPEC.key)) > 5


def test_a_manifest_of_another_worker_remains(broker: redis.Redis, directory: Path) -> None:
    replica = LocalReplica("w-0.a-1", SPEC)
    first, second = make_publisher(broker, lambda: [replica]), make_publisher(broker)
    first.publish(SPEC.key, directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    digest = second.publish(SPEC.key, directory)
    first.renew()
    manifest = published(broker)
    assert manifest is not None
    assert manifest.digest == digest


def test_bundles_of_removed_and_changed_deployments_expire(broker: redis.Redis, directory: Path) -> None:
    replicas = [LocalReplica("w-0.a-1", SPEC)]
    publisher = make_publisher(broker, lambda: replicas)
    publisher.publish(SPEC.key, directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")  # the engine has the earlier files
    broker.flushdb()
    publisher.renew()
    assert published(broker) is None
    replicas.clear()
    publisher.publish(SPEC.key, directory)
    publisher.renew()
    broker.flushdb()
    publisher.renew()
    assert published(broker) is None


def test_a_model_on_demand_is_published_before_its_first_request(broker: redis.Redis) -> None:
    replica = LocalReplica("w-0.a-1", SPEC)
    publisher = make_publisher(broker, lambda: [replica])
    publisher.publish_on_demand()
    assert published(broker) is None  # its load publishes it
    replica.wait_for_demand()
    publisher.publish_on_demand()
    assert published(broker)
    assert replica.phase == ReplicaPhase.UNLOADED


def test_a_model_on_demand_that_is_too_large_fails_with_the_reason(
    broker: redis.Redis, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_files, "MAX_BUNDLE_BYTES", 1 << 20)
    replica = LocalReplica("w-0.a-1", SPEC)
    replica.wait_for_demand()
    publisher = make_publisher(broker, lambda: [replica])
    publisher.publish_on_demand()
    assert (replica.phase, published(broker)) == (ReplicaPhase.FAILED, None)
    assert "at most 1048576" in replica.reason
    with pytest.raises(ModelError, match="at most 1048576"):
        publisher.publish(SPEC.key, directory)


def test_a_worker_starts_without_valkey_and_publishes_later(broker: redis.Redis, directory: Path) -> None:
    replica = LocalReplica("w-0.a-1", SPEC)
    client = redis.Redis(host="127.0.0.1", port=1)
    publisher = make_publisher(client, lambda: [replica])
    digest = publisher.publish(SPEC.key, directory)
    publisher._broker = broker
    publisher.renew()
    assert hash_bundle(b"".join(chunks(broker, digest))) == digest
    assert published(broker)
