"""A gateway, a settler and a worker without models: real processes whose deployments run at upstreams."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import httpx2
import redis

from inference_worker.contract.deployments import WANTED_KEY, WantedDeployment, WantedDeployments, encode_wanted
from inference_worker.contract.managed_commands import sign_managed
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.upstreams import UpstreamSpec
from millrace.local.program import die_with_parent, free_port
from millrace.local.stack import HTTP_PROTOCOL
from tests.support import waiting

ROOT = Path(__file__).resolve().parents[3]
eventually = partial(waiting.eventually, ignored=(httpx2.TransportError,))
CHILD_SERVER = Path(__file__).with_name("child_server.py")


@dataclass
class UpstreamPlatform:
    """The processes, and a client with the tenant's key."""

    client: httpx2.Client
    url: str
    broker: redis.Redis
    worker: subprocess.Popen[bytes]

    def deploy(self, upstreams: dict[str, UpstreamSpec]) -> None:
        """Make these the platform's deployments, and wait until they are served."""
        wanted = tuple(
            WantedDeployment(
                ModelSpec(name, spec.base_url or spec.model, "auto", upstream=_signed(name, spec)), {"default": 1}
            )
            for name, spec in upstreams.items()
        )
        self.broker.set(WANTED_KEY, encode_wanted(WantedDeployments(wanted)))
        eventually(lambda: self.models() == set(upstreams))

    def models(self) -> set[str]:
        return {each["id"] for each in self.client.get("/v1/models").json().get("data", [])}


def _signed(name: str, spec: UpstreamSpec) -> UpstreamSpec:
    """Return the upstream with a signature, as the platform publishes it."""
    secret = os.environ["MILLRACE_WORKER_SECRET"]
    return replace(spec, signature=sign_managed(name, spec, secret)) if spec.command else spec


@contextmanager
def upstream_platform(
    broker: redis.Redis,
    database: str,
    key: str,
    secrets: dict[int, str] | None = None,
    port: int | None = None,
    **settings: str,
) -> Iterator[UpstreamPlatform]:
    """Run the processes until the block ends. With `secrets`, the worker has these instead of those it receives.

    `settings` are further environment variables.
    """
    port = port or free_port()
    broker.set(WANTED_KEY, encode_wanted(WantedDeployments(())))
    environ = os.environ | {
        "MILLRACE_DATABASE_URL": database,
        "MILLRACE_WORKER_MODEL": "none",
        "MILLRACE_WORKER_NAME": f"relay-{port}",
        "MILLRACE_WORKER_POOLS": "default",
        "MILLRACE_REQUEST_TIMEOUT_SECONDS": "60",
        "UPSTREAM_SECRETS": json.dumps(secrets),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "platform")]),
        **settings,
    }
    arguments = ("--port", str(port), "--log-level", "warning", "--loop", "uvloop", "--http", HTTP_PROTOCOL)
    started = [
        _start(["manage.py", "run_settler", "--name", "upstreams"], environ),
        _start(["-m", "uvicorn", "millrace.conf.asgi:application", *arguments, "--no-access-log"], environ),
        _start(["-m", "inference_worker" if secrets is None else "tests.support.upstreams.worker"], environ),
    ]
    client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {key}"}, timeout=120)
    try:
        eventually(lambda: client.get("/healthz").status_code == 200)
        yield UpstreamPlatform(client, f"http://127.0.0.1:{port}", broker, started[-1])
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait()
        client.close()
        # Otherwise the worker of the next test settles this journal.
        journal = Path(environ["MILLRACE_DATA_DIR"]) / "journal" / environ["MILLRACE_WORKER_NAME"]
        shutil.rmtree(journal, ignore_errors=True)


def _start(arguments: Sequence[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environ, preexec_fn=die_with_parent(signal.SIGKILL))
