"""A managed engine through real processes: its worker starts the server, meters it, and survives its failures."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
import redis

from inference_worker.contract.deployments import WANTED_KEY, WantedDeployment, WantedDeployments, encode_wanted
from inference_worker.contract.messages import REPLICAS_KEY, decode_heartbeat
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from tests.support.billing.books import rate_card
from tests.support.invariants import assert_ledger_invariants
from tests.support.upstreams.platform import CHILD_SERVER, UpstreamPlatform, eventually, upstream_platform

pytestmark = pytest.mark.timeout(300)
COMMAND = f"CHILD_API_KEY={{api_key}} {sys.executable} {CHILD_SERVER} {{port}} fork"
OWN = UpstreamSpec(UpstreamEngine.MANAGED, "", "org/model", command=COMMAND, context_length=4096)
SETTINGS = {"MILLRACE_MANAGED_PROGRAMS": sys.executable, "OPENAI_API_KEY": "sk-of-the-operator"}


def ask(platform: UpstreamPlatform, prompt: str = "Hi") -> httpx2.Response:
    message = {"role": "user", "content": prompt}
    body = {"model": "own", "messages": [message], "max_tokens": 20, "stream": prompt == "crash"}
    return platform.client.post("/v1/chat/completions", json=body)


def server_pids(log: Path) -> list[int]:
    return [int(pid) for pid in re.findall(r"listening (\d+)", log.read_text())]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def reasons(broker: redis.Redis) -> list[str]:
    found: Any = broker.hgetall(REPLICAS_KEY)
    return [decode_heartbeat(payload).reason for payload in found.values()]


def test_a_managed_engine_is_metered_restarted_and_ended(
    broker: redis.Redis, database: str, secret: str, tmp_path: Path
) -> None:
    rate_card("own")
    log = tmp_path / "logs" / "managed-own.log"
    with upstream_platform(broker, database, secret, MILLRACE_DATA_DIR=str(tmp_path), **SETTINGS) as platform:
        platform.deploy({"own": OWN})
        answer = ask(platform).json()
        assert answer["choices"][0]["message"]["content"] == "from the child"
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 3)

        environ = json.loads(ask(platform, "environment").json()["choices"][0]["message"]["content"])
        assert not any(name.startswith("MILLRACE_") or "OPENAI" in name for name in environ)

        crashed = ask(platform, "crash")
        assert "upstream_error" in crashed.text
        eventually(lambda: ask(platform).status_code == 200)
        assert len(server_pids(log)) == 2
        assert not is_alive(server_pids(log)[0])

        wanted = WantedDeployment(ModelSpec("forged", "x", "auto", upstream=OWN), {"default": 1})
        broker.set(WANTED_KEY, encode_wanted(WantedDeployments((wanted,))))
        eventually(lambda: any("not signed" in reason for reason in reasons(broker)))
        eventually(lambda: not is_alive(server_pids(log)[-1]))  # of the removed deployment
        assert not (tmp_path / "logs" / "managed-forged.log").exists()

        platform.deploy({"own": OWN})
        last = server_pids(log)[-1]
        platform.worker.send_signal(signal.SIGKILL)
        sleepers = [int(pid) for pid in re.findall(r"sleeper (\d+)", log.read_text())]
        eventually(lambda: not is_alive(last) and not any(map(is_alive, sleepers)))

        def outcomes() -> list[tuple[str, str, bool]]:
            with psycopg.connect(database, autocommit=True, options="-c role=millrace_system") as connection:
                query = "SELECT outcome, usage_source, cost_femto > 0 FROM billing_usageevent"
                return connection.execute(query).fetchall()

        eventually(lambda: len(outcomes()) >= 4)
        assert outcomes().count(("completed", "upstream", True)) >= 3
        assert ("failed", "estimated", False) in outcomes()
        assert not any(has_cost for outcome, _, has_cost in outcomes() if outcome == "failed")
    assert_ledger_invariants(database)
    assert os.environ["MILLRACE_WORKER_SECRET"] not in log.read_text()
