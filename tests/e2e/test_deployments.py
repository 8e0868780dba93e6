"""Deployments of a running platform: added, updated to a new version under load, and removed on the command line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from millrace import cli
from tests.support.e2e.deployments import publish_prices, run_deployments
from tests.support.stack import Stack, eventually

pytestmark = pytest.mark.usefixtures("signed_in_operator")
NAME = "rolling"
STREAMS = 16


class StreamLoad:
    """Threads that send one streaming request after another until they are stopped."""

    def __init__(self, stack: Stack) -> None:
        self.completed = 0
        self.failures: list[str] = []
        self._stack = stack
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(STREAMS)]

    def __enter__(self) -> StreamLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        with httpx2.Client(timeout=120) as client:
            while not self._stop.is_set():
                failure = self._send(client, number)
                with self._lock:
                    if failure:
                        self.failures.append(failure)
                    else:
                        self.completed += 1

    def _send(self, client: httpx2.Client, number: int) -> str:
        """Return why a request failed; empty if it has completed."""
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": f"Count from {number}."}],
            "max_tokens": 12,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"{self._stack.url}/v1/chat/completions"
        try:
            with client.stream("POST", url, json=body, headers=self._stack.headers) as response:
                if response.status_code != 200:
                    return f"{response.status_code} {response.read()!r}"
                events = [line for line in response.iter_lines() if line.startswith("data: ")]
        except httpx2.HTTPError as exc:
            return repr(exc)
        if events[-1] != "data: [DONE]":
            return events[-1]
        usage = json.loads(events[-2].removeprefix("data: "))["usage"]
        return "" if usage["completion_tokens"] == 12 else events[-2]


def served_versions(row: Any) -> set[str]:
    return {replica["version"] for replica in row["replicas"] if replica["phase"] == "ready"}


@pytest.fixture
def deployed(stack: Stack) -> Iterator[Stack]:
    """The platform with a deployment that has a price and is ready."""
    added = run_deployments(
        "add",
        NAME,
        "--source",
        "embedded",
        "--dtype",
        "float32",
        "--kv-cache-memory",
        "128MiB",
        "--max-model-len",
        "2048",
    )
    run_deployments("load", NAME, "--wait")
    if not added["has_price"]:  # the price stays after the deployment is removed
        assert added["offered_price"]
        eventually(lambda: "model_not_priced" in refusal(stack))
        publish_prices(stack, NAME)
    eventually(lambda: not refusal(stack))
    yield stack
    run_deployments("remove", NAME)
    # Before the gateway knows, a request would wait 30 seconds for another worker.
    eventually(lambda: NAME not in {model.id for model in stack.client().models.list()})
    eventually(lambda: "model_not_found" in refusal(stack))


def refusal(stack: Stack) -> str:
    """Return the error of a short request; empty if it succeeds."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    response = httpx2.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=60)
    return "" if response.status_code == 200 else response.text


def test_a_new_version_replaces_the_old_one_under_16_streams_without_a_failed_request(deployed: Stack) -> None:
    before = run_deployments("show", NAME)
    assert (before["state"], served_versions(before)) == ("ready", {before["version"]})
    with StreamLoad(deployed) as load:
        eventually(lambda: load.completed >= STREAMS)
        after = run_deployments("update", NAME, "--revision", "2")
        assert after["version"] != before["version"]
        eventually(lambda: served_versions(run_deployments("show", NAME)) == {after["version"]}, 180)
        target = load.completed + STREAMS
        eventually(lambda: load.completed >= target or load.failures)
    assert load.failures == []
    assert run_deployments("show", NAME)["state"] == "ready"


def test_verbs_and_a_test_call(deployed: Stack) -> None:
    result = run_deployments("test", NAME, MILLRACE_API_KEY=deployed.key)
    assert result["tokens"] > 0
    run_deployments("drain", NAME, "--wait")
    eventually(lambda: "model_loading" in refusal(deployed))
    run_deployments("load", NAME, "--wait")
    eventually(lambda: not refusal(deployed))
    run_deployments("unload", NAME, "--wait")
    eventually(lambda: run_deployments("show", NAME)["replicas"] == [])
    run_deployments("load", NAME, "--wait")
    eventually(lambda: not refusal(deployed))


def test_a_deployment_that_cannot_be_loaded_reports_the_reason(stack: Stack, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    for option in ([], ["--dry-run"]):
        refused = CliRunner().invoke(cli.root, ["deployments", "add", "broken", "--source", str(missing), *option])
        assert refused.exit_code == 1
        assert "neither a model directory nor a .gguf file" in refused.stderr
    run_deployments("add", "broken", "--source", str(missing), "--force")
    try:
        eventually(lambda: run_deployments("show", "broken")["state"] == "failed")
        assert str(missing) in run_deployments("show", "broken")["reason"]
        assert httpx2.get(f"{stack.url}/readyz?models=all", timeout=60).status_code == 200
    finally:
        run_deployments("remove", "broken")


def test_a_deployment_is_scaled_to_zero_and_the_next_request_waits_for_its_load(deployed: Stack) -> None:
    run_deployments("update", NAME, "--idle-seconds", "2")
    eventually(lambda: run_deployments("show", NAME)["state"] == "scaled_to_zero")
    started = time.monotonic()
    assert refusal(deployed) == ""  # it waited for the load
    assert time.monotonic() - started > 0.5
    assert run_deployments("show", NAME)["state"] in ("ready", "scaled_to_zero")
