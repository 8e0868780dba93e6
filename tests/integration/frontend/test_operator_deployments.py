"""The operators' page of deployments: search, filters, shared figures and the fit check."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from django.test import Client

from frontend.core.gauges import line_points
from frontend.core.shared_values import SharedValue
from frontend.operator.deployments import page
from inference_worker.contract.deployments import WantedState
from millrace.apps.deployments import fit_checks
from millrace.apps.deployments.deployments import do_add_deployment
from millrace.apps.deployments.models import Deployment
from millrace.apps.deployments.tasks import check_fit
from millrace.apps.health.models import ReplicaSample
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import User
from tests.support.engine.tiny_qwen3 import write_qwen3
from tests.support.frontend.console import remembered
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db(transaction=True)
FIT, ADD = "/operator/deployments/fit", "/operator/deployments/new/path"


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as client:
        client.flushdb()
        yield client


@pytest.fixture
def operator(client: Client, broker: redis.Redis) -> Client:
    client.force_login(User.objects.create_superuser("op@example.com"))
    remembered(client.session)
    return client


def queued(broker: redis.Redis) -> list[Any]:
    """Return the arguments of the next web job, which is removed from the queue."""
    popped: Any = broker.blpop(["millrace:web:web"], timeout=10)
    arguments: list[Any] = json.loads(base64.b64decode(json.loads(popped[1])["body"]))[0]
    return arguments


def test_deployments_are_searched_and_filtered(operator: Client) -> None:
    do_add_deployment("llama", "/models/own", state=WantedState.UNLOADED)
    do_add_deployment("qwen", "/models/other")

    def list_names(query: str) -> set[str]:
        text = operator.get(f"/operator/deployments/{query}").content.decode()
        return set(re.findall(r'aria-label="Edit ([^"]+)"', text))

    everything = list_names("")
    assert {"llama", "qwen", "smollm2-135m"} < everything
    assert list_names("?q=LLAM") == {"llama"}
    assert list_names("?q=/models/") == {"llama", "qwen"}
    assert list_names("?state=unloaded") == {"llama"}
    assert list_names("?state=pending") == everything - {"llama"}
    assert list_names("?q=qwen&state=unloaded") == set()
    text = operator.get("/operator/deployments/?q=nothing").content.decode()
    assert "No deployment matches" in text


def test_a_shared_value_is_computed_once_in_its_period() -> None:
    times: list[datetime] = []

    def count(now: datetime) -> int:
        times.append(now)
        return len(times)

    value = SharedValue(timedelta(seconds=15), count)
    start = datetime.now(UTC)
    found = [value.get(start + timedelta(seconds=seconds)) for seconds in (0, 5, 14, 15, 29, 30, 3)]
    assert found == [1, 1, 1, 2, 2, 3, 4]  # the clock can be set back
    assert times == [start + timedelta(seconds=seconds) for seconds in (0, 15, 30, 3)]


def test_the_fit_of_a_model_is_checked_in_a_job(operator: Client, broker: redis.Redis, tmp_path: Path) -> None:
    source = write_qwen3(tmp_path / "model")
    fields = {"source": str(source), "dtype": "bfloat16", "quantization": "int4", "max_model_len": "64"}
    assert "Check fit" in operator.get(ADD).content.decode()
    started = operator.post(FIT, fields).content.decode()
    (address,) = re.findall(r'hx-get="([^"]+)"', started)
    assert operator.get(address).content.decode() == started  # the check runs
    assert "Another fit check is running" in operator.post(FIT, fields).content.decode()
    arguments = queued(broker)
    check_fit(*arguments)
    text = operator.get(address).content.decode()
    assert "Fits" in text
    assert "Qwen3ForCausalLM" in text
    assert "Context: 64 tokens" in text
    assert re.search(r"Weights <b>0\.00 GiB</b>", text)
    assert re.search(r"KV cache <b>1\.00 GiB</b>", text)
    assert re.search(r"Spare <b>[\d.]+ GiB</b> of [\d.]+ GiB free", text)
    assert re.search(r"One stream, at most: [\d,]+ tokens/s", text)

    operator.post(FIT, {**fields, "source": str(tmp_path / "absent")})  # the first check has ended
    check_id, *others = queued(broker)
    check_fit(check_id, *others)
    assert "neither a model directory nor a .gguf file" in operator.get(f"{FIT}/{check_id}").content.decode()
    invalid = operator.post(FIT, {**fields, "source": "", "max_model_len": "x"}).content.decode()
    assert "Source: This field is required. Maximum context: Enter a whole number." in invalid
    assert "ended without a result" in operator.get(f"{FIT}/{'0' * 32}").content.decode()


ADDED = {
    "name": "own", "pools": "default=1", "dtype": "auto", "quantization": "none", "control_tokens": "template",
    "tool_parser": "auto", "reasoning_parser": "auto",
}  # fmt: skip


def test_a_source_that_cannot_be_loaded_is_refused_unless_forced(operator: Client, tmp_path: Path) -> None:
    source = write_qwen3(tmp_path / "model")
    (source / "tokenizer.json").write_text("{}")
    fields = ADDED | {"source": str(source)}
    refused = operator.post(ADD, fields)
    assert refused.status_code == 422
    assert "tokenizer.json" in refused.content.decode()
    assert "Set force to use it anyway" in refused.content.decode()
    assert not unscoped(Deployment).filter(name="own")
    assert operator.post(ADD, fields | {"force": "on"}).status_code == 303
    assert unscoped(Deployment).get(name="own").source == str(source)


def test_a_model_that_does_not_fit_is_refused_unless_forced_or_changed(
    operator: Client, broker: redis.Redis, tmp_path: Path
) -> None:
    fields = ADDED | {"source": str(write_qwen3(tmp_path / "model")), "kv_cache_memory": "900000GiB"}
    started = operator.post(FIT, fields).content.decode()
    (address,) = re.findall(r'hx-get="([^"]+)"', started)
    check_fit(*queued(broker))
    result = operator.get(address).content.decode()
    assert "Does not fit" in result
    (check_id,) = re.findall(r'name="fit_check" value="([^"]+)"', result)
    for _ in range(2):  # the page with the error has the check, too
        refused = operator.post(ADD, fields | {"fit_check": check_id})
        assert refused.status_code == 422
        assert "Tick “Force” to use it anyway." in refused.content.decode()
        (check_id,) = re.findall(r'name="fit_check" value="([^"]+)"', refused.content.decode())
    changed = fields | {"fit_check": check_id, "kv_cache_memory": ""}
    assert operator.post(ADD, changed).status_code == 303
    forced = fields | {"fit_check": check_id, "name": "other", "force": "on"}
    assert operator.post(ADD, forced).status_code == 303


def test_a_fit_check_ends_in_time(
    operator: Client, broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_checks, "CHECK_SECONDS", 0.05)
    operator.post(FIT, {"source": str(tmp_path), "dtype": "auto", "quantization": "none"})
    check_id, *others = queued(broker)
    check_fit(check_id, *others)
    assert "The check took longer than" in operator.get(f"{FIT}/{check_id}").content.decode()


def test_other_users_start_no_check(client: Client, broker: redis.Redis) -> None:
    client.force_login(User.objects.create_user("owner@example.com"))
    assert client.post(FIT, {"source": "/"}).status_code == 404
    assert client.get(f"{FIT}/{'0' * 32}").status_code == 404
    assert not broker.keys("millrace:fit-check*")


def test_the_trend_of_tokens_is_drawn_from_minutes(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of one model, one of which started within the hour, and a model without tokens."""
    do_add_deployment("llama", "/models/own")
    do_add_deployment("idle", "/models/other")
    now = datetime.now(UTC).replace(second=30, microsecond=0)
    minute = now.replace(second=0)
    with all_tenants_scope(BypassReason.OPERATOR):
        for name, model, first in (("a", "llama", 60), ("b", "llama", 10), ("c", "idle", 60)):
            for age in range(first, -1, -1):
                tokens = 0 if model == "idle" else 1200 * (first - age)
                add_sample(minute - timedelta(minutes=age), name, model, tokens)
        found = page._read_tokens(now)
    assert set(found) == {"llama"}
    assert found["llama"] == [2400] * 10 + [1200] * 50
    assert page._rate(found["llama"]) == 40
    assert page._trend(found["llama"]) == [20] * 24 + [30] + [40] * 4
    assert (page._rate([]), page._trend([])) == (0, [])
    monkeypatch.setattr(page, "_TOKENS_BY_MINUTE", SharedValue(timedelta(seconds=15), page._read_tokens))
    shown = operator.get("/operator/deployments/").content.decode()
    assert shown.count('class="sparkline"') == 1


def add_sample(at: datetime, replica: str, model: str, tokens: int) -> None:
    names = (
        "heartbeat_at running waiting kv_blocks kv_blocks_used cpu_ms forward_ms steps batched_sequences cache_queries"
        " cache_hits preemptions"
    )
    counts = dict.fromkeys(names.split(), 0)
    ReplicaSample.objects.create(
        sampled_at=at, replica_id=replica, worker="w", model=model, max_num_seqs=1, cores=1, ttft=[],
        prompt_tokens=tokens // 2, generation_tokens=tokens // 2, **counts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "points"),
    [([], ""), ([5], ""), ([0, 0], ""), ([0, 5, 10], "0,96 50,50 100,4"), ([7, 7], "0,4 100,4")],
)
def test_a_line_begins_at_zero(values: list[int], points: str) -> None:
    assert line_points(values) == points
