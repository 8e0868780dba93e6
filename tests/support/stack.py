"""A whole platform, as `make up` runs it, with a separate port and data directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil

from inference_worker.contract.worker_names import default_name
from millrace.environment.configuration import read_env_file
from millrace.local.program import die_with_parent
from tenants.isolation import db_roles
from tests.support import waiting
from tests.support.engine.tiny_models import make_cross_encoder
from tests.support.models import share_models

MODEL = "smollm2-135m"
EMBEDDING_MODEL = "all-minilm-l6-v2"
RERANK_MODEL = "tiny-reranker"
START_SECONDS = 400
# Connection errors and unavailable services count as false.
UNAVAILABLE = (httpx2.TransportError, LookupError, openai.APIConnectionError, openai.InternalServerError)
eventually = partial(waiting.eventually, ignored=UNAVAILABLE)


@dataclass(frozen=True)
class Stack:
    """A running platform, with its credentials and helpers for tests."""

    process: subprocess.Popen[bytes]
    data_dir: Path
    port: int
    key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def database_url(self) -> str:
        """Return the URL of its database for a role that sees every tenant."""
        kept = read_env_file(self.data_dir / "env")
        return db_roles.as_role(kept["MILLRACE_DATABASE_URL"], db_roles.SYSTEM)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, **options)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    def pid(self, *words: str, model: str | None = None) -> int:
        """Return the process of this platform whose command line contains the words."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = " ".join(child.cmdline())
                serves = child.environ().get("MILLRACE_WORKER_MODEL") if model else None
            except psutil.NoSuchProcess:
                continue
            if all(word in command for word in words) and serves == model:
                return child.pid
        raise LookupError(f"no process {words}")

    def worker(self) -> int:
        return self.pid("inference_worker", model=MODEL)

    @property
    def worker_name(self) -> str:
        return default_name(MODEL, self.data_dir)

    def gateway(self) -> int:
        return self.pid("uvicorn")

    def wait_until_ready(self) -> None:
        eventually(lambda: httpx2.get(f"{self.url}/readyz?models=all", timeout=20).status_code == 200, START_SECONDS)

    def events(self, **filters: str) -> list[dict[str, Any]]:
        """Return settled usage events of the demo tenant from the management API."""
        response = httpx2.get(f"{self.url}/api/usage/events", params=filters, headers=self.headers, timeout=60)
        assert response.status_code == 200, response.text
        return list(response.json()["results"])

    def event(self, request_id: str) -> dict[str, Any]:
        """Wait for the single usage event of a request, and return it with its tokens at the top level."""
        eventually(lambda: self.events(request_id=request_id))
        (event,) = self.events(request_id=request_id)
        return {**event, **event["tokens"]}

    def metric(self, name: str) -> float:
        """Return a metric's value, summed over its labels."""
        lines = httpx2.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(data_dir: Path, port: int, log: Path, *arguments: str, **settings: str) -> subprocess.Popen[bytes]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "DJANGO_"))}
    environ |= {"MILLRACE_DATA_DIR": str(data_dir), "MILLRACE_PORT": str(port), **settings}
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "millrace.cli", "up", *arguments],
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(signal.SIGINT),
        )


def wait_for_output(process: subprocess.Popen[bytes], log: Path, text: str) -> None:
    """Wait until the log of a starting platform contains the text."""

    def is_written() -> bool:
        assert process.poll() is None, f"it ended:\n{log.read_text()}"
        return text in log.read_text()

    eventually(is_written, START_SECONDS, describe=log.read_text)


@contextmanager
def running(folder: Path, **settings: str) -> Iterator[Stack]:
    """Run a platform with its state and its log in a directory until the block ends."""
    make_cross_encoder(folder / RERANK_MODEL)
    settings = {
        # One generating model is enough. In float32, its greedy output is the same on every CPU. In bfloat16, outputs
        # differ between machines with and without AMX.
        "MILLRACE_MODELS": f"{MODEL}=embedded?dtype=float32,{EMBEDDING_MODEL}=embedded:minilm,"
        f"{RERANK_MODEL}={folder / RERANK_MODEL}",
        "MILLRACE_MAX_NUM_SEQS": "128",
        "MILLRACE_SHUTDOWN_TIMEOUT_SECONDS": "15",  # long enough for running streams on a busy machine
        "MILLRACE_LOG_FORMAT": "json",
        "MILLRACE_STREAM_RETENTION_SECONDS": "120",
        "MILLRACE_SEMANTIC_CACHE_WAIT_MS": "10000",
    } | settings
    share_models(folder / "state")
    with running_with(folder, **settings) as stack:
        stack.wait_until_ready()  # all models: the gateway reads the bundles of the others after it is ready
        yield stack


@contextmanager
def running_with(folder: Path, *arguments: str, **settings: str) -> Iterator[Stack]:
    """Run `millrace up` with these arguments until the block ends."""
    folder.chmod(0o711)  # PostgreSQL may run as another user and must reach its data below
    log, port = folder / "up.log", free_port()
    process = start(folder / "state", port, log, *arguments, **settings)
    try:
        wait_for_output(process, log, "All processes are running.")
        key = json.loads((folder / "state" / "credentials.json").read_text())["demo_key"]
        yield Stack(process, folder / "state", port, key)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
