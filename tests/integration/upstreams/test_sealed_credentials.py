"""A worker that receives credentials and sends requests with them, and where their secrets must not be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from inference_worker.contract.credentials import sealed_credentials_name
from inference_worker.contract.messages import BillingContext, InferenceJob, claim_key, encode
from inference_worker.contract.request import SamplingParams
from inference_worker.contract.settings import worker_settings
from inference_worker.contract.upstreams import UpstreamRequest
from inference_worker.worker.worker import NO_MODEL, Worker, new_replica_id
from millrace.apps.deployments.deployments import do_add_deployment, do_remove_deployment
from tenants.actions import do_create_tenant
from tenants.actions.credentials import do_create_credential, do_rotate_credential, do_update_credential
from tenants.models import UpstreamCredential
from tenants.tasks import deliver_credentials
from tests.support.rows import unscoped
from tests.support.upstreams.protocol_server import ProtocolServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)

SECRETS = ("sk-of-the-platform-0123456789", "sk-rotated-0123456789abcdef", "sk-of-the-tenant-0123456789")
BODY = b'{"messages":[{"role":"user","content":"Hi"}]}'


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    server = ProtocolServer()
    yield server
    server.close()


@pytest.fixture
def worker(broker: redis.Redis, server: ProtocolServer, tmp_path: Path) -> Iterator[Worker]:
    """A worker of the pool `default`, which serves the upstream `remote`."""
    fields: dict[str, Any] = {"engine": "openai", "preset": "openai", "upstream_model": "gpt-x"}
    do_add_deployment("remote", server.url, allow_internal=True, secret=SECRETS[0], **fields)
    settings = replace(worker_settings(), data_dir=tmp_path, worker_model=NO_MODEL, worker_name="w-0", min_free_disk=0)
    worker = Worker(settings, new_replica_id(settings))
    yield worker
    worker.drain()
    worker.close()


def run_request(broker: redis.Redis, worker: Worker, server: ProtocolServer, name: str, credential: int) -> str:
    """Run a request at the worker, and return the authorization with which the upstream received it."""
    (replica,) = worker.replicas.replicas
    job = InferenceJob(
        BillingContext(1, name, 0, 1, 1, 1, "remote"),
        "gw",
        [],
        SamplingParams(max_tokens=4),
        b"",
        time.time() + 60,
        version=replica.version,
        upstream=UpstreamRequest("chat", BODY, 100, 25),
        credential=credential,
    )
    record: dict[Any, Any] = {"attempt": 1, "state": "queued", "job": encode(job), "tenant": 1, "gateway": "gw"}
    broker.hset(claim_key(name, 0), mapping=record)
    count = len(server.received)
    assert worker.serve([(name, 0, 1)], replica.id)
    eventually(lambda: len(server.received) > count and not worker.live())
    return str(server.received[-1].headers["authorization"])


def test_a_changed_concurrency_limit_reaches_the_worker(broker: redis.Redis, worker: Worker) -> None:
    (credential,) = unscoped(UpstreamCredential).all()

    def has_limit(limit: int | None) -> bool:
        deliver_credentials()  # again, since the worker may publish its key later
        return worker.credentials.max_concurrency(credential.pk) == limit

    do_update_credential(credential, max_concurrency=4)
    eventually(lambda: has_limit(4))
    do_update_credential(credential, max_concurrency=None)
    eventually(lambda: has_limit(None))
    assert worker.credentials.secret(credential.pk) == SECRETS[0]


def test_secrets_reach_the_upstream_and_are_stored_nowhere(
    broker: redis.Redis,
    worker: Worker,
    server: ProtocolServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("DEBUG")
    (ours,) = unscoped(UpstreamCredential).all()

    def has(secret: str, credential: int) -> bool:
        deliver_credentials()  # as the web jobs do every two seconds
        return worker.credentials._contents.secrets.get(credential) == secret

    eventually(lambda: has(SECRETS[0], ours.pk))
    assert run_request(broker, worker, server, "req_1", ours.pk) == f"Bearer {SECRETS[0]}"
    do_rotate_credential(ours, SECRETS[1])
    eventually(
        lambda: worker.credentials._contents.secrets.get(ours.pk) == SECRETS[1]
    )  # without a restart or a web job
    assert run_request(broker, worker, server, "req_2", ours.pk) == f"Bearer {SECRETS[1]}"
    own = do_create_credential(do_create_tenant("acme", "Acme"), "own", SECRETS[2], model_names=["remote"])
    eventually(lambda: worker.credentials._contents.secrets.get(own.pk) == SECRETS[2])
    assert run_request(broker, worker, server, "req_3", own.pk) == f"Bearer {SECRETS[2]}"

    places = [broker.dump(key) or b"" for key in broker.scan_iter(count=1000)]
    assert broker.exists(sealed_credentials_name(worker.replica_id))

    def stored() -> list[bytes]:
        return [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]

    eventually(lambda: any(b"req_3" in content for content in stored()))  # the journal has the usage
    places += stored()
    printed = capfd.readouterr()
    places += [text.encode() for text in (caplog.text, printed.out, printed.err)]
    for secret in SECRETS:
        assert not any(secret.encode() in place for place in places)

    do_remove_deployment("remote")  # the worker then needs no credentials
    eventually(lambda: not worker.credentials._contents.secrets)
    assert not broker.exists(sealed_credentials_name(worker.replica_id))
