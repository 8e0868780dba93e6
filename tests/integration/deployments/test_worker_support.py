"""What workers can compute with: advertised without a replica, and refused with one text before and at a load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from django.test import Client
from rest_framework.test import APIClient

from inference_worker.contract.compute_support import SlowReason, describe_support
from inference_worker.contract.deployments import WantedState
from inference_worker.contract.messages import HEARTBEAT_TTL_MS, SUPPORT_KEY, WorkerSupport, beat_key, encode
from inference_worker.contract.settings import worker_settings
from inference_worker.worker.worker import NO_MODEL, Worker, new_replica_id
from millrace.apps.deployments.deployment_checks import check_deployment
from millrace.apps.deployments.deployments import do_add_deployment, do_update_deployment
from millrace.apps.deployments.fleet_status import read_fleet_status
from millrace.apps.health.health_checks import find_issues
from millrace.apps.health.issues import IssueType
from tenants.actions.common import FieldRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import User
from tests.support.frontend.console import remembered
from tests.support.models import share_models
from tests.support.tenants.management_api import by_person
from tests.support.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)

OPTIONS: dict[str, Any] = {"name": "llama", "source": "embedded", "kv_cache_dtype": "int8"}
REFUSAL = (
    "A KV cache in int8 needs the C kernels (MILLRACE_CPU_KERNELS turns the C kernels off); set kv_cache_dtype to auto."
)
GERMAN_REFUSAL = (
    "Ein KV-Cache in int8 benötigt die C-Kernel (MILLRACE_CPU_KERNELS schaltet die C-Kernel aus). Setzen Sie"
    " kv_cache_dtype auf auto."
)


@pytest.fixture
def start_worker(broker: redis.Redis, tmp_path: Path) -> Iterator[Callable[[], Worker]]:
    """Return a function that starts a worker of the pool `default`, without a model and without the C kernels."""
    share_models(tmp_path / "state")
    settings = replace(
        worker_settings(), data_dir=tmp_path / "state", worker_model=NO_MODEL, worker_name="w-0", min_free_disk=0,
        cpu_kernels="pytorch", shutdown_timeout_seconds=1,
    )  # fmt: skip
    workers: list[Worker] = []

    def start() -> Worker:
        workers.append(Worker(settings, new_replica_id(settings)))
        return workers[-1]

    yield start
    for worker in workers:
        worker.drain()
        worker.close()


@pytest.fixture
def operator() -> User:
    return User.objects.create_superuser("op@example.com")


@pytest.fixture
def german(client: Client, operator: User) -> Client:
    """Return the operator's client, with the console in German."""
    client.force_login(operator)
    client.post("/preferences", {"language": "de"})
    remembered(client.session)
    return client


def test_a_worker_without_a_replica_advertises_what_it_can_do(
    start_worker: Callable[[], Worker], broker: redis.Redis, german: Client
) -> None:
    assert check_deployment(**OPTIONS).unchecked == (
        "The options were not checked against workers: no worker of the pool default is running."
    )
    worker = start_worker()
    eventually(lambda: read_fleet_status().workers)
    (found,) = read_fleet_status().workers
    assert (found.id, found.pools) == (worker.replica_id, ("default",))
    assert (found.support.device, found.support.slow) == ("cpu", SlowReason.KERNELS_OFF)
    assert read_fleet_status().replicas == ()
    for change in (check_deployment, do_add_deployment):
        with pytest.raises(FieldRefused) as caught:
            change(**OPTIONS)
        assert (caught.value.field, str(caught.value)) == ("kv_cache_dtype", REFUSAL)
    do_add_deployment("llama", "embedded", state=WantedState.UNLOADED)
    with pytest.raises(FieldRefused):
        do_update_deployment("llama", kv_cache_dtype="int8")
    fields = {"dtype": "auto", "quantization": "none", "pools": "default=1", "control_tokens": "template"}
    parsers = {"tool_parser": "auto", "reasoning_parser": "auto"}
    response = german.post("/operator/deployments/new/path", OPTIONS | {"name": "b"} | fields | parsers)
    assert GERMAN_REFUSAL in response.content.decode()
    worker.drain()
    worker.close()
    assert read_fleet_status().workers == ()
    assert not broker.exists(SUPPORT_KEY, beat_key(worker.replica_id))


def test_the_state_of_a_deployment_has_the_text_of_the_worker_that_refuses_it(
    start_worker: Callable[[], Worker], operator: User, german: Client
) -> None:
    do_add_deployment(**OPTIONS)  # no worker is running, so nothing was checked
    start_worker()
    api: APIClient = by_person(operator)

    def read() -> dict[str, Any]:
        found: dict[str, Any] = api.get("/api/operator/deployments/llama").json()
        return found

    eventually(lambda: read()["state"] == "failed")
    found = read()
    assert found["reason"] == REFUSAL
    assert [replica["reason"] for replica in found["replicas"]] == [REFUSAL]
    with all_tenants_scope(BypassReason.OPERATOR):
        found_issues = find_issues(read_fleet_status())
    (issue,) = [each for each in found_issues if (each.issue_type, each.subject) == (IssueType.MODEL, "llama")]
    assert (issue.urgent, issue.todo) == (True, f"It could not be loaded: {REFUSAL}")
    assert GERMAN_REFUSAL in german.get("/operator/deployments/").content.decode()
    assert f"Es konnte nicht geladen werden: {GERMAN_REFUSAL}" in german.get("/operator/").content.decode()


def test_workers_that_have_ended_are_forgotten(broker: redis.Redis) -> None:
    support = encode(WorkerSupport(("default",), describe_support("cpu", "avx2", None)))
    broker.hset(SUPPORT_KEY, mapping={"new.aa": support, "late.aa": support, "lost.aa": support, "odd.aa": b"\xc1"})
    for name, age_ms in (("new.aa", 0), ("late.aa", 5_000), ("odd.aa", 0)):
        broker.set(beat_key(name), "", px=HEARTBEAT_TTL_MS - age_ms)
    assert [worker.id for worker in read_fleet_status().workers] == ["new.aa"]
    assert set(broker.hkeys(SUPPORT_KEY)) == {b"new.aa", b"late.aa", b"odd.aa"}
