"""An empty Valkey, helpers that create executions, and workers with fake engines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from inference_worker.contract.messages import InferenceJob, claim_key, encode
from inference_worker.contract.settings import WorkerSettings, worker_settings
from tests.support.engine.fakes import Clock, FakeRunner, fake_engine
from tests.support.models import share_models
from tests.support.worker.replicas import Queued, Replicas

BLOCK = 16


@pytest.fixture
def queued(broker: redis.Redis) -> Queued:
    """Return a function that writes a job's claim record as a gateway does, and returns its key."""

    def write(job: InferenceJob) -> str:
        key = claim_key(job.billing_context.request_id, job.billing_context.execution)
        record = {"attempt": 1, "state": "queued", "job": encode(job), "tenant": 1, "gateway": job.gateway_id}
        broker.hset(key, mapping=record)
        return key

    return write


@pytest.fixture(scope="module")
def replica_settings(tmp_path_factory: pytest.TempPathFactory) -> WorkerSettings:
    small = replace(worker_settings(), block_size=BLOCK, kv_cache_memory=192 << 20, shutdown_timeout_seconds=1)
    data_dir = tmp_path_factory.mktemp("state")
    share_models(data_dir)
    return replace(small, data_dir=data_dir, worker_model="smollm2-135m")


@pytest.fixture
def replicas(
    broker: redis.Redis, queued: Queued, replica_settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Replicas]:
    replicas = Replicas(broker, queued, replica_settings)
    shutil.rmtree(replica_settings.data_dir / "journal", ignore_errors=True)  # of the previous test

    def engine(_: object) -> Any:
        replicas.runners.append(FakeRunner(80))
        return fake_engine(runner=replicas.runners[-1], clock=Clock())[0]

    monkeypatch.setattr("inference_worker.worker.worker.make_engine", engine)
    yield replicas
    for worker in list(replicas.workers):
        replicas.stop(worker)
