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

from frontend.core.shared_values import SharedValue
from inference_worker.contract.deployments import WantedState
from millrace.apps.operations import fit_checks
from millrace.apps.operations.deployments import do_add_deployment
from millrace.apps.operations.tasks import check_fit
from tenants.models import User
from tests.support.engine.tiny_qwen3 import write_qwen3

pytestmark = pytest.mark.django_db(transaction=True)
FIT = "/operator/deployments/fit"


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as client:
        client.flushdb()
        yield client


@pytest.fixture
def operator(client: Client, broker: redis.Redis) -> Client:
    client.force_login(User.objects.create_superuser("op@example.com"))
    return client


def queued(broker: redis.Redis) -> list[Any]:
    """Return the arguments of the next web job, which is removed from the queue."""
    popped: Any = broker.blpop(["millrace:web:web"], timeout=10)
    arguments: list[Any] = json.loads(base64.b64decode(json.loads(popped[1])["body"]))[0]
    return arguments


def test_deployments_are_searched_and_filtered(operator: Client) -> None:
    do_add_deployment("llama", "/models/own", state=WantedState.UNLOADED)
    do_add_deployment("qwen", "/models/other")

    def shown(query: str) -> set[str]:
        page = operator.get(f"/operator/deployments/{query}").content.decode()
        return set(re.findall(r'aria-label="Edit ([^"]+)"', page))

    everything = shown("")
    assert {"llama", "qwen", "smollm2-135m"} < everything
    assert shown("?q=LLAM") == {"llama"}
    assert shown("?q=/models/") == {"llama", "qwen"}
    assert shown("?state=unloaded") == {"llama"}
    assert shown("?state=pending") == everything - {"llama"}
    assert shown("?q=qwen&state=unloaded") == set()
    page = operator.get("/operator/deployments/?q=nothing").content.decode()
    assert "No deployment matches" in page
    assert "Unloaded 1" in page


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
    assert "Check fit" in operator.get("/operator/deployments/new").content.decode()
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
    assert re.search(r"One stream, at most: [\d,]+ tokens/s", text)

    operator.post(FIT, {**fields, "source": str(tmp_path / "absent")})  # the first check has ended
    check_id, *others = queued(broker)
    check_fit(check_id, *others)
    assert "neither a model directory nor a .gguf file" in operator.get(f"{FIT}/{check_id}").content.decode()
    invalid = operator.post(FIT, {**fields, "source": "", "max_model_len": "x"}).content.decode()
    assert "Source: This field is required. Maximum context: Enter a whole number." in invalid
    assert "ended without a result" in operator.get(f"{FIT}/{'0' * 32}").content.decode()


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
