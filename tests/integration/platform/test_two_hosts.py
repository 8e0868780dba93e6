"""Two hosts that share only PostgreSQL and Valkey: a worker with a model, and a gateway without model files.

Each host is a process tree with its own home and data directory. The source `~/model` exists only on the worker's host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
import redis

from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec
from millrace.local.program import die_with_parent, free_port
from millrace.local.stack import HTTP_PROTOCOL
from tests.support.billing.books import rate_card
from tests.support.models import models_data_dir
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[3]
MESSAGES = [{"role": "user", "content": "Say hello."}]
SETTLER = ("manage.py", "run_settler", "--name", "hosts")
GATEWAY = ("-m", "uvicorn", "millrace.conf.asgi:application", "--loop", "uvloop", "--http", HTTP_PROTOCOL)
WORKER = ("-m", "inference_worker")


@dataclass
class Host:
    """A machine: a home directory with the data directory, and running processes."""

    home: Path
    environ: Mapping[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.home / "log"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environ = dict(self.environ) | {"HOME": str(self.home), "MILLRACE_DATA_DIR": str(self.home / "state")}
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environ,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()

    def files(self) -> set[str]:
        return {path.name for path in self.home.rglob("*") if path.is_file()}


@dataclass
class TwoHosts:
    """The hosts, and a client of the gateway."""

    worker: Host
    gateway: Host
    client: httpx2.Client
    port: int

    def start_gateway(self) -> None:
        self.gateway.start(*SETTLER)
        self.gateway.start(*GATEWAY, "--port", str(self.port), "--log-level", "warning", "--no-access-log")
        self.wait_for(lambda: self.client.get("/healthz").status_code == 200)

    def wait_for(self, check: Callable[[], bool]) -> None:
        logs = (self.worker.log, self.gateway.log)
        eventually(
            check,
            ignored=(httpx2.TransportError,),
            describe=lambda: "\n".join(log.read_text()[-3000:] for log in logs if log.exists()),
        )

    def chat(self) -> httpx2.Response:
        body = {"model": "m", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
        return self.client.post("/v1/chat/completions", json=body)


@pytest.fixture
def hosts(broker: redis.Redis, database: str, secret: str, tmp_path: Path) -> Iterator[TwoHosts]:
    rate_card("m")
    environ = os.environ | {
        "MILLRACE_DATABASE_URL": database,
        "MILLRACE_MODELS": "m=~/model?dtype=float32",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "platform")]),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),  # with the built kernels
    }
    names = ("worker", "gateway")
    for name in names:
        (tmp_path / name).mkdir()
    source = ensure_model(ModelSpec("m", "embedded", "auto"), models_data_dir())
    shutil.copytree(source, tmp_path / "worker" / "model", copy_function=os.symlink)
    worker, gateway = (Host(tmp_path / name, environ) for name in names)
    port = free_port()
    headers = {"authorization": f"Bearer {secret}"}
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120) as client:
        yield TwoHosts(worker, gateway, client, port)
    worker.stop()
    gateway.stop()


def test_a_gateway_without_model_files_answers_a_chat(hosts: TwoHosts, broker: redis.Redis) -> None:
    hosts.start_gateway()
    refused = hosts.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
    hosts.worker.start(*WORKER)
    hosts.wait_for(lambda: hosts.chat().status_code == 200)
    answer = hosts.chat().json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 4
    prompt = {"model": "m", "messages": MESSAGES}
    tokens = hosts.client.post("/tokenize", json=prompt).json()["tokens"]
    assert len(tokens) == answer["usage"]["prompt_tokens"]
    found = hosts.gateway.files()
    assert "tokenizer.json" in found
    assert not {name for name in found if name.endswith((".safetensors", ".gguf"))}
    assert not (hosts.gateway.home / "state" / "models").exists()
    hosts.worker.stop()
    hosts.gateway.stop()
    broker.flushdb()
    hosts.start_gateway()  # with the bundle on its disk
    assert hosts.client.post("/tokenize", json=prompt).json()["tokens"] == tokens


def test_a_process_does_not_start_without_the_worker_secret(hosts: TwoHosts) -> None:
    for host, arguments in ((hosts.worker, WORKER), (hosts.gateway, GATEWAY)):
        host.environ = {name: value for name, value in host.environ.items() if name != "MILLRACE_WORKER_SECRET"}
        assert host.start(*arguments).wait(120) != 0
        assert "MILLRACE_WORKER_SECRET: is required" in host.log.read_text()
