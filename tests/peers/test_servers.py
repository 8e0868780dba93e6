"""Real servers behind a gateway and a worker: LiteLLM's proxy as an upstream, llama.cpp and vLLM as managed engines.

An opt-in suite, `make test-peers`: it needs the servers. These variables name them:

- PEER_LITELLM: the program `litellm` of a virtual environment with `litellm[proxy]`
- PEER_LLAMA_SERVER: the program `llama-server`
- PEER_VLLM: the program `vllm` of a virtual environment with vLLM, such as `benchmarks.peers.install` makes it
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
import redis

from inference_worker.checkpoints.model_source import embedded_source, ensure_model
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.local.program import die_with_parent, free_port
from tests.support.billing.books import rate_card
from tests.support.invariants import assert_ledger_invariants
from tests.support.models import models_data_dir
from tests.support.upstreams.platform import UpstreamPlatform, eventually, upstream_platform

pytestmark = pytest.mark.timeout(540)
MODEL = "own"


@contextmanager
def deployed(
    broker: redis.Redis, database: str, secret: str, upstream: UpstreamSpec, directory: Path, **settings: str
) -> Iterator[UpstreamPlatform]:
    rate_card(MODEL)
    settings |= {"MILLRACE_DATA_DIR": str(directory)}
    credentials = None if upstream.credential is None else {upstream.credential: "sk-" + "b7" * 24}
    with upstream_platform(broker, database, secret, credentials, **settings) as platform:
        platform.deploy({MODEL: upstream})
        yield platform
    assert_ledger_invariants(database)


def ask(platform: UpstreamPlatform, prompt: str = "Name a color.", **fields: Any) -> httpx2.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16, **fields}
    return platform.client.post("/v1/chat/completions", json=body)


def usage_of(database: str, response: httpx2.Response) -> tuple[Any, ...]:
    """Return the outcome, the source, the tokens and whether there is a cost of the request's usage event."""
    query = (
        "SELECT outcome, usage_source, uncached + cache_read, output, cost_femto > 0 FROM billing_usageevent"
        " WHERE request_id = %s"
    )
    found: list[Any] = []
    with psycopg.connect(database, autocommit=True, options="-c role=millrace_system") as connection:
        eventually(lambda: found.extend(connection.execute(query, (response.headers["x-request-id"],))) or found)
    return tuple(found[0])


def text_of(response: httpx2.Response) -> str:
    """Return the text of a response or a stream."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])


def check_streams(platform: UpstreamPlatform, database: str) -> None:
    """Check a response, a stream and a cancelled stream, with their usage."""
    response = ask(platform)
    usage = response.json()["usage"]
    assert response.json()["choices"][0]["message"]["content"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    assert usage_of(database, response) == ("completed", "upstream", *counts, True)
    streamed = ask(platform, stream=True, stream_options={"include_usage": True})
    assert text_of(streamed)
    assert usage_of(database, streamed)[:2] == ("completed", "upstream")
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to 900."}],
        "max_tokens": 900,
        "stream": True,
    }
    with platform.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        next(stream.iter_lines())
    outcome, source, _, output, _ = usage_of(database, stream)
    assert (outcome, source, output < 900) == ("cancelled", "estimated", True)


def check_restart(platform: UpstreamPlatform, log: Path, program: str) -> None:
    """Kill the server, and wait until its successor answers. Kill the worker, and wait until no process is left."""

    def servers() -> set[int]:
        return {int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_server(path, log)}

    first = servers()
    assert first, program
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    eventually(lambda: servers() and not servers() & first, 60)
    eventually(lambda: ask(platform).status_code == 200, 300)
    print(f"{Path(program).name}: answers {time.monotonic() - began:.1f} s after it was killed")  # noqa: T201 - a figure
    last = servers()
    platform.worker.send_signal(signal.SIGKILL)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in last), 30)


def _is_server(process: Path, log: Path) -> bool:
    """Return whether a guard with this log has started the process."""
    try:
        parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
        return str(log).encode() in Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return False


def test_llama_server_is_a_managed_engine(broker: redis.Redis, database: str, secret: str, tmp_path: Path) -> None:
    program = os.environ["PEER_LLAMA_SERVER"]
    gguf = embedded_source("embedded")
    command = (
        f"LLAMA_API_KEY={{api_key}} {program} --model {{model}} --host {{host}} --port {{port}} -c 8192 -np 4 -t 2"
    )
    spec = UpstreamSpec(UpstreamEngine.MANAGED, "", str(gguf), preset="llamacpp", command=command, context_length=2048)
    with deployed(broker, database, secret, spec, tmp_path, MILLRACE_MANAGED_PROGRAMS=program) as platform:
        check_streams(platform, database)
        schema = {"type": "object", "properties": {"color": {"type": "string"}}, "required": ["color"]}
        formatted = {"type": "json_schema", "json_schema": {"name": "color", "schema": schema, "strict": True}}
        response = ask(platform, response_format=formatted, max_tokens=64)
        assert "color" in json.loads(response.json()["choices"][0]["message"]["content"])
        check_restart(platform, tmp_path / "logs" / "managed-own.log", program)


def test_vllm_is_a_managed_engine(broker: redis.Redis, database: str, secret: str, tmp_path: Path) -> None:
    program = os.environ["PEER_VLLM"]
    model = ensure_model(ModelSpec("smollm2", "embedded", "bfloat16"), models_data_dir())
    command = (
        f"VLLM_API_KEY={{api_key}} VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 {program} serve {{model}} --host {{host}}"
        " --port {port} --max-model-len {context_length} --dtype bfloat16 --max-num-seqs 16 --enforce-eager"
    )
    spec = UpstreamSpec(UpstreamEngine.MANAGED, "", str(model), preset="vllm", command=command, context_length=2048)
    with deployed(broker, database, secret, spec, tmp_path, MILLRACE_MANAGED_PROGRAMS=program) as platform:
        check_streams(platform, database)
        check_restart(platform, tmp_path / "logs" / "managed-own.log", program)


def test_litellms_proxy_is_an_upstream(broker: redis.Redis, database: str, secret: str, tmp_path: Path) -> None:
    port, key = free_port(), "sk-" + "b7" * 24
    mock = {"model": "openai/mock", "api_key": "none"}
    models = {
        "mock": {**mock, "mock_response": "Hello from the mock model."},
        "limited": {**mock, "mock_response": "litellm.RateLimitError"},
        "broken": {**mock, "mock_response": "litellm.InternalServerError"},
    }
    config = {
        "model_list": [{"model_name": name, "litellm_params": params} for name, params in models.items()],
        "general_settings": {"master_key": key},
        "litellm_settings": {"num_retries": 0},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    argv = [os.environ["PEER_LITELLM"], "--config", str(tmp_path / "config.yaml"), "--port", str(port)]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (tmp_path / "litellm.log").open("wb") as log:
        proxy = subprocess.Popen(argv, env=environ, stdout=log, stderr=log, preexec_fn=die_with_parent(signal.SIGKILL))
    try:
        base_url = f"http://127.0.0.1:{port}/v1"
        eventually(lambda: httpx2.get(f"{base_url}/models", headers={"authorization": f"Bearer {key}"}).is_success, 120)
        spec = UpstreamSpec(UpstreamEngine.OPENAI, base_url, "mock", "litellm", 1, allow_internal=True)
        with deployed(broker, database, secret, spec, tmp_path / "data") as platform:
            for stream in (False, True):
                response = ask(platform, stream=stream)
                assert text_of(response) == "Hello from the mock model."
                assert usage_of(database, response)[:2] == ("completed", "upstream"), response.text
            messages = {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "Hi"}]}
            response = platform.client.post("/v1/messages", json=messages)
            assert response.json()["content"][0]["text"] == "Hello from the mock model."
            rate_card("limited"), rate_card("broken")
            platform.deploy(
                {
                    name: UpstreamSpec(UpstreamEngine.OPENAI, base_url, name, "litellm", 1, allow_internal=True)
                    for name in ("limited", "broken")
                }
            )
            assert ask(platform, model="broken").status_code == 502
            began = time.monotonic()
            response = ask(platform, model="limited")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "server_is_overloaded")
            assert time.monotonic() - began < 90
    finally:
        proxy.kill()
        proxy.wait()
