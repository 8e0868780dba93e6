"""The catalog of deployments: in the database, the audit log and Valkey's copy, and its API."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.management import call_command
from django.db import connection
from rest_framework.test import APIClient

from inference_worker.contract.compute_support import ComputeSupport, SlowReason, describe_support, find_refusal
from inference_worker.contract.deployments import (
    ALL_WORKERS,
    WANTED_KEY,
    WantedDeployments,
    WantedState,
    decode_wanted,
)
from inference_worker.contract.managed_commands import is_signed
from inference_worker.contract.messages import (
    HEARTBEAT_TTL_MS,
    SUPPORT_KEY,
    ReplicaPhase,
    WorkerSupport,
    beat_key,
    encode,
)
from inference_worker.contract.settings import ModelSpec
from millrace.apps.deployments import catalog_copy, tasks
from millrace.apps.deployments.deployment_checks import check_deployment
from millrace.apps.deployments.deployment_status import DeploymentState, deployment_status
from millrace.apps.deployments.deployments import (
    do_add_deployment,
    do_import_deployments,
    do_import_settings,
    do_remove_deployment,
    do_set_deployment_state,
    do_update_deployment,
)
from millrace.apps.deployments.fleet_status import read_fleet_status
from millrace.apps.deployments.gateway_heartbeat import GATEWAYS_KEY, GatewayHeartbeat, gateway_heartbeat_key
from millrace.apps.deployments.models import Deployment
from tenants.actions import ActionRefused, Conflict, do_create_tenant
from tenants.actions.common import FieldRefused
from tenants.actions.credentials import do_create_credential
from tenants.credentials.encryption import decrypt_secret
from tenants.models import AuditEntry, UpstreamCredential, User
from tests.support.engine.tiny_qwen3 import write_qwen3
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person

pytestmark = pytest.mark.django_db(transaction=True)

URL = "/api/operator/deployments"
SPECS = (ModelSpec("small", "embedded", "auto"), ModelSpec("small-f32", "embedded", "float32"))


def published(broker: redis.Redis) -> WantedDeployments:
    payload: Any = broker.get(WANTED_KEY)
    return decode_wanted(payload)


def names(broker: redis.Redis) -> list[str]:
    return [each.spec.name for each in published(broker).deployments]


@pytest.fixture
def catalog(broker: redis.Redis) -> None:
    do_import_settings(SPECS)


@pytest.mark.usefixtures("catalog")
def test_changes_are_stored_audited_and_published(broker: redis.Redis) -> None:
    do_add_deployment(
        "llama",
        "/models/llama",
        dtype="bfloat16",
        default_max_tokens=50,
        idle_seconds=900,
        sampling_defaults="top_k=5",
        truncate_inputs=False,
    )
    wanted = published(broker).find("llama")
    assert wanted is not None
    assert (wanted.spec.dtype, wanted.pools, wanted.default_max_tokens) == ("bfloat16", {"default": 1}, 50)
    assert (wanted.sampling_defaults, wanted.truncate_inputs) == ("top_k=5", False)
    version = wanted.spec.version
    do_update_deployment("llama", revision="v2", kv_cache_memory="0.5")
    do_update_deployment("llama", revision="v2")  # changes nothing
    changed = published(broker).find("llama")
    assert changed is not None
    assert changed.spec.version != version
    assert changed.spec.kv_cache_memory == 0.5
    do_set_deployment_state("llama", WantedState.DRAINED)
    do_remove_deployment("llama")
    assert names(broker) == ["small", "small-f32"]
    entries = [entry for entry in unscoped(AuditEntry).order_by("id") if entry.object_name == "llama"]
    assert [(entry.action, entry.tenant_id) for entry in entries] == [
        ("deployment.created", None),
        ("deployment.updated", None),
        ("deployment.updated", None),
        ("deployment.removed", None),
    ]
    assert entries[1].after == {"revision": "v2", "kv_cache_memory": "0.5"}


def test_the_first_addition_keeps_the_models_of_the_settings(broker: redis.Redis) -> None:
    do_add_deployment("llama", "/models/llama")
    assert set(names(broker)) == {"llama", *(spec.name for spec in settings.MILLRACE.models)}


@pytest.mark.usefixtures("catalog")
def test_the_import_of_settings_keeps_operators_changes(broker: redis.Redis) -> None:
    small = published(broker).find("small")
    assert small is not None
    assert (small.spec, small.pools) == (SPECS[0], {"small": ALL_WORKERS})
    do_update_deployment("small", max_model_len=512)
    do_add_deployment("llama", "/models/llama")
    do_import_settings(SPECS)
    small = published(broker).find("small")
    assert small is not None
    assert small.spec.max_model_len == 512
    do_import_settings((replace(SPECS[0], dtype="float32"),))  # the setting has changed, and a model was removed
    assert names(broker) == ["llama", "small"]
    small = published(broker).find("small")
    assert small is not None
    assert (small.spec.dtype, small.spec.max_model_len) == ("float32", None)


def test_the_command_imports_the_settings(broker: redis.Redis) -> None:
    for _ in range(2):
        call_command("import_models")
    assert names(broker) == sorted(spec.name for spec in settings.MILLRACE.models)


@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize(
    "options",
    [
        {"name": "Not valid"},
        {"name": "import"},
        {"source": ""},
        {"dtype": "float8"},
        {"quantization": "int3"},
        {"kv_cache_dtype": "int4"},
        {"tool_parser": "unknown"},
        {"control_tokens": "nowhere"},
        {"draft_model": "self:int3"},
        {"draft_model": "embedded:minilm"},
        {"draft_model": "/" * 1025},
        {"max_model_len": 1},
        {"kv_cache_memory": "much"},
        {"pools": {}},
        {"pools": {"default": -1}},
        {"pools": {"default": True}},
        {"pools": {"": 1}},
        {"idle_seconds": -1},
        {"sampling_defaults": "temperature=3"},
        {"sampling_defaults": "top_p=0.5", "engine": "openai", "source": "https://api.example.com/v1"},
        {"truncate_inputs": False, "engine": "openai", "upstream_model": "m", "source": "https://api.example.com/v1"},
    ],
)
def test_invalid_values_change_nothing(broker: redis.Redis, options: dict[str, Any]) -> None:
    before = published(broker)
    with pytest.raises(ActionRefused):
        do_add_deployment(**{"name": "llama", "source": "/models/llama"} | options)
    assert published(broker) == before
    assert unscoped(Deployment).count() == 2


AVX2 = describe_support("cpu", "avx2", None, has_bfloat16=False, has_float16=False)
PYTORCH = describe_support("cpu", "", SlowReason.KERNELS_MISSING, has_bfloat16=False, has_float16=False)


@pytest.fixture
def start_worker(broker: redis.Redis) -> Callable[..., None]:
    """Return a function that writes the heartbeat of a worker that can compute with `support`."""

    def start(name: str, support: ComputeSupport, *pools: str) -> None:
        broker.hset(SUPPORT_KEY, f"{name}.aa", encode(WorkerSupport(pools, support)))
        broker.set(beat_key(f"{name}.aa"), "", px=HEARTBEAT_TTL_MS)

    return start


@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize(
    ("support", "options", "field"),
    [
        (AVX2, {"dtype": "float16"}, "dtype"),
        (AVX2, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        (AVX2, {"kv_cache_dtype": "int8", "dtype": "float32"}, "kv_cache_dtype"),
        (PYTORCH, {"dtype": "bfloat16"}, "dtype"),
        (PYTORCH, {"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
    ],
)
def test_options_that_no_worker_of_the_pool_supports_are_refused(
    support: ComputeSupport, options: dict[str, Any], field: str, start_worker: Callable[..., None]
) -> None:
    start_worker("one", support, "default")
    refusal = find_refusal(support, options.get("dtype", "auto"), options.get("kv_cache_dtype", "auto"))
    assert refusal is not None
    for change in (do_add_deployment, check_deployment):
        with pytest.raises(FieldRefused) as caught:
            change(name="llama", source="embedded", **options)
        assert (caught.value.field, str(caught.value)) == (field, refusal.message)
    do_add_deployment("llama", "embedded")
    with pytest.raises(FieldRefused, match=r"set dtype|set kv_cache_dtype"):
        do_update_deployment("llama", **options)
    do_update_deployment("llama", revision="v2")


@pytest.mark.usefixtures("catalog")
def test_a_pool_needs_one_worker_that_supports_the_options(start_worker: Callable[..., None]) -> None:
    assert check_deployment("llama", "embedded", kv_cache_dtype="int8").unchecked == (
        "The options were not checked against workers: no worker of the pool default is running."
    )
    assert check_deployment("llama", "embedded").unchecked == ""
    start_worker("one", PYTORCH, "default", "slow")
    start_worker("two", AVX2, "default")
    assert check_deployment("llama", "embedded", kv_cache_dtype="int8").unchecked == ""
    for pools in ({"default": 0}, {"slow": 1}, {"default": 1, "slow": 1}):
        with pytest.raises(FieldRefused, match=r"needs the C kernels .*; set kv_cache_dtype to auto"):
            check_deployment("llama", "embedded", kv_cache_dtype="int8", pools=pools)
    # A model without a KV cache does not use the option.
    assert check_deployment("vectors", "embedded:minilm", kv_cache_dtype="int8", pools={"slow": 1}).unchecked == ""


@pytest.mark.usefixtures("catalog")
def test_a_taken_name_and_an_unknown_one_are_conflicts(broker: redis.Redis) -> None:
    with pytest.raises(Conflict):
        do_add_deployment("small", "embedded")
    for change in (lambda: do_update_deployment("unknown", revision="2"), lambda: do_remove_deployment("unknown")):
        with pytest.raises(Conflict):
            change()


@pytest.mark.usefixtures("catalog")
def test_an_import_is_idempotent_and_complete_or_nothing(broker: redis.Redis) -> None:
    small = {"name": "small", "dtype": "float32", "source": "embedded"}
    entries = [small, {"name": "llama", "source": "/models/llama"}]
    assert do_import_deployments(entries) == {"created": ["llama"], "updated": ["small"], "unchanged": []}
    assert do_import_deployments(entries) == {"created": [], "updated": [], "unchanged": ["small", "llama"]}
    with pytest.raises(ActionRefused, match="'bad'"):
        do_import_deployments([{"name": "good", "source": "/g"}, {"name": "bad", "source": "/b", "dtype": "x"}])
    assert names(broker) == ["llama", "small", "small-f32"]


def test_the_first_import_can_name_models_of_the_settings(broker: redis.Redis) -> None:
    name = settings.MILLRACE.models[0].name
    entries = [{"name": "llama", "source": "/models/llama"}, {"name": name, "source": "embedded", "dtype": "float32"}]
    assert do_import_deployments(entries) == {"created": ["llama"], "updated": [name], "unchanged": []}
    assert set(names(broker)) == {"llama", *(spec.name for spec in settings.MILLRACE.models)}


@pytest.mark.usefixtures("catalog")
def test_concurrent_changes_are_all_published(broker: redis.Redis) -> None:
    def add(number: int) -> None:
        do_add_deployment(f"model-{number}", "/models/m")
        connection.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(8)))
    assert len(names(broker)) == 10


@pytest.mark.usefixtures("catalog")
def test_the_copy_is_restored_after_valkey_lost_it(broker: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.flushdb()
    assert tasks.publish_deployments() == 2
    assert names(broker) == ["small", "small-f32"]

    def away() -> int:
        raise redis.ConnectionError

    monkeypatch.setattr(catalog_copy, "copy_deployments", away)
    do_add_deployment("llama", "/models/llama")
    monkeypatch.undo()
    assert names(broker) == ["small", "small-f32"]
    tasks.publish_deployments()
    assert names(broker) == ["llama", "small", "small-f32"]
    for name in ("llama", "small", "small-f32"):
        do_remove_deployment(name)
    assert names(broker) == []


@pytest.mark.parametrize(
    ("replicas", "state"),
    [
        ((), DeploymentState.PENDING),
        (("ready",), DeploymentState.READY),
        (("loading",), DeploymentState.LOADING),
        (("failed",), DeploymentState.FAILED),
        (("unloaded",), DeploymentState.SCALED_TO_ZERO),
        (("old", "loading"), DeploymentState.UPDATING),
        (("old", "failed"), DeploymentState.DEGRADED),
        (("old", "ready"), DeploymentState.READY),
    ],
)
@pytest.mark.usefixtures("catalog")
def test_the_state_follows_from_the_replicas(
    speak: Callable[..., None], replicas: tuple[str, ...], state: DeploymentState
) -> None:
    row = unscoped(Deployment).get(name="small")
    for number, kind in enumerate(replicas):
        phase = ReplicaPhase.READY if kind in ("ready", "old") else ReplicaPhase(kind)
        speak(
            f"small-0.aa-{number}",
            model="small",
            ready=phase == ReplicaPhase.READY,
            phase=phase,
            version="old" if kind == "old" else row.spec.version,
            reason="no memory" if kind == "failed" else "",
            loaded_bytes=62,
            total_bytes=100,
        )
    status = deployment_status(row, read_fleet_status())
    assert status.state == state
    assert status.reason == ("no memory" if "failed" in replicas else "")
    assert status.progress_percent == (62 if "loading" in replicas else None)
    assert deployment_status(row, None).state == DeploymentState.UNKNOWN


@pytest.mark.usefixtures("catalog")
def test_a_deployment_whose_bundle_a_gateway_refuses_has_failed(
    broker: redis.Redis, speak: Callable[..., None]
) -> None:
    rows = [unscoped(Deployment).get(name=spec.name) for spec in SPECS]
    for row in rows:
        speak(f"{row.name}-0.aa", model=row.name, version=row.spec.version)
    broker.sadd(GATEWAYS_KEY, "gw-a")
    presence = GatewayHeartbeat(0, failures={"small": "its bundle is not signed"})
    broker.set(gateway_heartbeat_key("gw-a"), encode(presence), ex=5)
    found = [deployment_status(row, read_fleet_status()) for row in rows]
    assert [status.state for status in found] == [DeploymentState.FAILED, DeploymentState.READY]
    assert [status.reason for status in found] == ["its bundle is not signed", ""]
    drained = do_set_deployment_state("small", WantedState.UNLOADED)
    assert deployment_status(drained, read_fleet_status()).state == DeploymentState.DRAINING


@pytest.mark.parametrize(
    ("wanted", "phase", "running", "state"),
    [
        (WantedState.DRAINED, ReplicaPhase.READY, 0, DeploymentState.DRAINING),
        (WantedState.DRAINED, ReplicaPhase.DRAINING, 1, DeploymentState.DRAINING),
        (WantedState.DRAINED, ReplicaPhase.DRAINING, 0, DeploymentState.DRAINED),
        (WantedState.UNLOADED, ReplicaPhase.DRAINING, 0, DeploymentState.DRAINING),
        (WantedState.UNLOADED, None, 0, DeploymentState.UNLOADED),
    ],
)
@pytest.mark.usefixtures("catalog")
def test_a_drained_deployment_keeps_its_weights_and_an_unloaded_one_has_none(
    speak: Callable[..., None],
    wanted: WantedState,
    phase: ReplicaPhase | None,
    running: int,
    state: DeploymentState,
) -> None:
    row = do_set_deployment_state("small", wanted)
    if phase is not None:
        draining = phase == ReplicaPhase.DRAINING
        speak("small-0.aa", model="small", ready=not draining, draining=draining, phase=phase, running=running)
    assert deployment_status(row, read_fleet_status()).state == state


@pytest.fixture
def operator() -> APIClient:
    return by_person(User.objects.create_superuser("op@example.com"))


def call(client: APIClient, method: str, path: str = "", body: Any = None) -> Any:
    return getattr(client, method)(f"{URL}{path}", body, format="json")


@pytest.mark.usefixtures("catalog")
def test_the_api_adds_updates_and_removes(operator: APIClient, broker: redis.Redis, tmp_path: Path) -> None:
    added = call(operator, "post", body={"name": "llama", "source": "embedded", "dtype": "float32"})
    assert added.status_code == 201, added.content
    row = added.json()
    assert (row["state"], row["wanted_state"], row["has_price"]) == ("pending", "loaded", False)
    assert {price["component"] for price in row["offered_price"]} >= {"uncached", "output"}
    assert call(operator, "post", body={"name": "llama", "source": "embedded"}).status_code == 409
    draft = call(operator, "post", "/llama/price")
    assert draft.status_code == 201, draft.content
    changed = call(operator, "patch", "/llama", {"revision": "v2"})
    assert changed.json()["version"] != row["version"]
    assert call(operator, "patch", "/llama", {"dtype": "float8"}).status_code == 400
    for action, wanted in (("drain", "drained"), ("unload", "unloaded"), ("load", "loaded")):
        assert call(operator, "post", f"/llama/{action}").json()["wanted_state"] == wanted
    assert [each["name"] for each in call(operator, "get").json()] == ["llama", "small", "small-f32"]
    imported = call(operator, "post", "/import", {"deployments": [{"name": "llama", "source": "embedded"}]})
    assert imported.json() == {"created": [], "updated": [], "unchanged": ["llama"]}
    missing = {"name": "new", "source": str(tmp_path / "none")}
    assert call(operator, "post", "/check", missing).status_code == 400
    assert call(operator, "post", "/check", {"name": "new", "source": "embedded"}).json()["task"] == "generate"
    assert call(operator, "delete", "/llama").status_code == 204
    assert call(operator, "get", "/llama").status_code == 404


@pytest.mark.usefixtures("catalog")
def test_a_draft_model_is_checked_and_published(operator: APIClient, broker: redis.Redis, tmp_path: Path) -> None:
    model, other = write_qwen3(tmp_path / "model"), write_qwen3(tmp_path / "other")
    body = {"name": "llama", "source": str(model)}
    for draft in ("self:int8", str(other)):
        assert call(operator, "post", "/check", body | {"draft_model": draft}).json()["task"] == "generate"
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"][-1]["content"] = "<another>"
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    for draft, message in ((str(other), "the vocabulary is not that of the model"), ("/none", "neither a model")):
        refused = call(operator, "post", "/check", body | {"draft_model": draft})
        assert refused.status_code == 400
        assert message in refused.json()["errors"]["draft_model"][0]
    added = call(operator, "post", body=body | {"draft_model": "self:int8"}).json()
    assert added["draft_model"] == "self:int8"
    wanted = published(broker).find("llama")
    assert wanted is not None
    assert wanted.spec.draft_model == "self:int8"
    assert call(operator, "patch", "/llama", {"draft_model": ""}).json()["version"] != added["version"]


@pytest.mark.usefixtures("catalog")
def test_the_directory_of_an_unknown_user_is_reported(operator: APIClient, broker: redis.Redis) -> None:
    body = {"name": "llama", "source": "~no-such-user/model"}
    assert call(operator, "post", "/check", body).status_code == 400
    assert call(operator, "post", body=body).status_code == 400
    # It may exist on the machines of the workers.
    assert call(operator, "post", body=body | {"force": True}).status_code == 201
    assert [each["state"] for each in call(operator, "get").json()] == ["pending"] * 3


@pytest.mark.usefixtures("catalog")
def test_only_operators_reach_the_api() -> None:
    other = by_person(User.objects.create_user("user@example.com", "a long password 1", name="User"))
    assert call(other, "get").status_code == 404
    assert call(APIClient(), "get").status_code in (401, 403)


UPSTREAM = {"name": "remote", "engine": "openai", "upstream_model": "gpt-x", "preset": "openai"}


@pytest.mark.usefixtures("catalog")
def test_an_upstream_is_a_deployment(operator: APIClient, broker: redis.Redis) -> None:
    checked = operator.post(f"{URL}/check", UPSTREAM | {"secret": "sk-up"}, format="json")
    assert (checked.status_code, checked.json()["task"]) == (200, "generate"), checked.content
    added = operator.post(URL, UPSTREAM | {"secret": "sk-upstream-secret"}, format="json")
    assert added.status_code == 201, added.content
    row = added.json()
    assert "sk-upstream-secret" not in added.content.decode()
    assert (row["source"], row["state"]) == ("https://api.openai.com/v1", "pending")  # the preset's URL
    wanted = published(broker).find("remote")
    assert wanted is not None
    assert wanted.spec.upstream is not None
    assert (wanted.spec.upstream.model, wanted.spec.upstream.credential) == ("gpt-x", row["credential_id"])
    assert wanted.spec.source == wanted.spec.upstream.base_url
    (stored,) = unscoped(UpstreamCredential).all()
    assert (stored.name, stored.tenant_id, decrypt_secret(stored)) == ("remote", None, "sk-upstream-secret")
    assert b"sk-upstream-secret" not in (broker.get(WANTED_KEY) or b"")  # type: ignore[operator]
    one = f"/api/operator/upstream-credentials/{stored.pk}"
    refused = operator.delete(one)
    assert (refused.status_code, "deployment uses" in refused.json()["detail"]) == (409, True)
    changed = operator.patch(f"{URL}/remote", {"concurrency": 8, "credential_id": None}, format="json").json()
    assert (changed["concurrency"], changed["version"] != row["version"]) == (8, True)
    assert operator.delete(one).status_code == 204
    assert "sk-upstream-secret" not in repr(list(unscoped(AuditEntry).values_list("before", "after")))


MANAGED = {"engine": "managed", "preset": "vllm", "command": "vllm serve {model} --port {port}"}
WRONG_UPSTREAMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"engine": "other"}, "engine"),
    ({"upstream_model": ""}, "upstream_model"),
    ({"preset": "unknown"}, "preset"),
    ({"preset": "anthropic"}, "preset"),  # of another engine
    ({"preset": ""}, "base_url"),
    ({"base_url": "http://api.example.com/v1"}, "base_url"),  # plain http
    ({"base_url": "https://10.0.0.1/v1"}, "base_url"),
    ({"base_url": "https://user:pw@example.com/v1"}, "base_url"),
    ({"base_url": "https://example.com/v1?key=x"}, "base_url"),
    ({"base_url": "file:///etc/passwd", "allow_internal": True}, "base_url"),
    ({"base_url": "https://example.com/v1", "source": "embedded"}, "base_url"),
    ({"credential_id": 1 << 40}, "credential_id"),
    ({"credential_id": 1, "secret": "sk-x"}, "secret"),
    ({"secret": "two words"}, "secret"),
    ({"concurrency": 0}, "concurrency"),
    ({"command": "vllm serve"}, "command"),
    ({"engine": "managed", "preset": "vllm"}, "command"),
    ({"engine": "managed", "preset": "vllm", "command": "vllm serve {model}"}, "command"),  # without a port
    ({**MANAGED, "command": "vllm serve {model} --port {port} --api-key {api_key}"}, "command"),
    ({**MANAGED, "command": "LD_PRELOAD=/tmp/x.so vllm serve --port {port}"}, "command"),
    ({**MANAGED, "command": "vllm serve {model} --port {port} --x {secret}"}, "command"),
    ({**MANAGED, "command": "vllm serve 'unclosed --port {port}"}, "command"),
    ({**MANAGED, "command": "vllm serve --port {port}\nrm"}, "command"),
    ({**MANAGED, "command": "{model} --port {port}"}, "command"),
    ({**MANAGED, "upstream_model": "--trust-remote-code"}, "upstream_model"),
    ({**MANAGED, "base_url": "https://api.example.com/v1"}, "base_url"),
    ({**MANAGED, "allow_internal": True}, "allow_internal"),
    ({**MANAGED, "credential_id": 1}, "credential_id"),
    ({"engine": "millrace", "source": "embedded"}, "upstream_model"),
)


@pytest.mark.usefixtures("catalog")
def test_invalid_upstreams_name_the_field(operator: APIClient) -> None:
    for (changes, field), url in itertools.product(WRONG_UPSTREAMS, (f"{URL}/check", URL)):
        response = operator.post(url, UPSTREAM | changes, format="json")
        assert (response.status_code, list(response.json()["errors"])) == (400, [field]), (changes, response.content)
    assert unscoped(UpstreamCredential).count() == 0


@pytest.mark.usefixtures("catalog")
def test_internal_and_managed_upstreams_and_foreign_credentials(operator: APIClient, broker: redis.Redis) -> None:
    internal = UPSTREAM | {"name": "local", "preset": "vllm", "base_url": "http://127.0.0.1:8001/v1/"}
    assert operator.post(URL, internal | {"allow_internal": True}, format="json").json()["source"].endswith(":8001/v1")
    managed = {"name": "own", "engine": "managed", "upstream_model": "org/model", "preset": "vllm"}
    assert (
        operator.post(URL, managed | {"command": "vllm serve {model} --port {port}"}, format="json").status_code == 201
    )
    spec = published(broker).find("own")
    assert spec is not None
    assert spec.spec.upstream is not None
    assert (spec.spec.source, spec.spec.upstream.base_url, spec.spec.upstream.command) == (
        "org/model",
        "",
        "vllm serve {model} --port {port}",
    )
    secret = settings.MILLRACE.worker_secret
    assert is_signed("own", spec.spec.upstream, spec.spec.upstream.signature, secret)
    assert not is_signed("own", replace(spec.spec.upstream, command="x"), spec.spec.upstream.signature, secret)
    assert spec.spec.version == unscoped(Deployment).get(name="own").spec.version  # without the signature
    tenant = do_create_tenant("acme", "Acme")
    own = do_create_credential(tenant, "own", "sk-own", model_names=["remote"])
    foreign = operator.post(URL, UPSTREAM | {"credential_id": own.pk}, format="json")
    assert list(foreign.json()["errors"]) == ["credential_id"]  # a tenant's credential is not the platform's


@pytest.mark.usefixtures("catalog")
def test_the_api_refuses_a_source_that_cannot_be_loaded_unless_forced(operator: APIClient, tmp_path: Path) -> None:
    source = write_qwen3(tmp_path / "model")
    (source / "tokenizer.json").write_text("{}")
    body = {"name": "own", "source": str(source)}
    imported = {"deployments": [body]}
    for address, sent in ((URL, body), (f"{URL}/check", body), (f"{URL}/import", imported)):
        refused = operator.post(address, sent, format="json")
        assert refused.status_code == 400, address
        assert "tokenizer.json" in refused.content.decode()
        assert not unscoped(Deployment).filter(name="own")
    assert operator.post(f"{URL}/check", body | {"force": True}, format="json").status_code == 200
    assert operator.post(URL, body | {"force": True}, format="json").status_code == 201
    assert operator.post(f"{URL}/import", imported, format="json").json()["unchanged"] == ["own"]
    small = f"{URL}/small"
    assert operator.patch(small, {"source": str(source)}, format="json").status_code == 400
    assert operator.patch(small, {"source": str(source), "force": True}, format="json").status_code == 200
    assert operator.patch(small, {"idle_seconds": 60}, format="json").status_code == 200  # the source is not checked
    forced = {"deployments": [body | {"name": "other", "force": True}]}
    assert operator.post(f"{URL}/import", forced, format="json").json()["created"] == ["other"]
