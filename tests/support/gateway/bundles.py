"""Model bundles for gateways without workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import redis

from inference_worker.checkpoints.bundle_files import StoredBundle
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec
from millrace.gateway.core.catalog import ServedModel, load_served_model
from tests.support.models import models_data_dir

if TYPE_CHECKING:
    from inference_worker.worker.bundle_publisher import BundlePublisher
    from inference_worker.worker.replica import LocalReplica

SECRET = "tests-" + "w" * 44  # as in tests/conftest.py


def load_models(specs: Iterable[ModelSpec]) -> dict[str, ServedModel]:
    """Return the deployments by name, as a gateway loads them. Those of one directory share a tokenizer."""
    models: dict[str, ServedModel] = {}
    for spec in specs:
        bundle = StoredBundle(ensure_model(spec, models_data_dir()), "", 0)
        models[spec.name] = load_served_model(spec, bundle, models.values())
    return models


def publish_bundles(specs: Iterable[ModelSpec]) -> None:
    """Publish the bundles of the deployments in the tests' Valkey, as workers do."""
    with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as broker:
        publisher = make_publisher(broker)
        for spec in specs:
            publisher.publish(spec.key, ensure_model(spec, models_data_dir()))


def make_publisher(broker: redis.Redis, replicas: Callable[[], Collection[LocalReplica]] = tuple) -> BundlePublisher:
    """Return the publisher of a worker with these replicas."""
    from inference_worker.worker.bundle_publisher import BundlePublisher  # here, since it imports torch

    return BundlePublisher(broker, SECRET, replicas, lambda spec: ensure_model(spec, models_data_dir()))
