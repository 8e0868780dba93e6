"""Several gateway processes with one database, one broker and one settler. The test is their worker."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import redis.asyncio as redis
from asgiref.sync import sync_to_async
from django.db import connection

from inference_worker.contract import claims
from inference_worker.contract.messages import (
    USAGE_STREAM,
    Claimed,
    End,
    ExecutionUsage,
    InferenceJob,
    Tokens,
    Vectors,
    claim_key,
    decode_job,
    encode,
    event_log_key,
    gateway_stream,
)
from inference_worker.contract.request import TokenCounts
from inference_worker.contract.settings import parse_models
from millrace.gateway.admission import budget_admission
from millrace.gateway.auth import revocation
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.local.program import die_with_parent, free_port
from millrace.local.stack import HTTP_PROTOCOL
from tests.support.gateway.bundles import publish_bundles
from tests.support.gateway.replica import Replica
from tests.support.waiting import eventually_async

ROOT = Path(__file__).resolve().parents[3]
MODEL = "smollm2-135m"
EMBEDDING_MODEL = "all-minilm-l6-v2"
VECTOR_SIZE = 384
REQUEST_SECONDS = 5
LEASE_SECONDS = 4.0


@dataclass
class GatewayProcess:
    """One gateway process and a client of it."""

    process: subprocess.Popen[bytes]
    client: httpx2.AsyncClient

    async def send_request(self, max_tokens: int | None = 100, *, content: str = "Hello") -> httpx2.Response | None:
        """Send a request and return the response, or None if the gateway died."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
        try:
            return await self.client.post("/v1/chat/completions", json=body)
        except httpx2.TransportError:
            return None

    async def send_with_retries(self, max_tokens: int | None = 100) -> httpx2.Response | None:
        """Send a request and retry on 503, as SDKs do. On a busy machine, a lease may not be granted in time."""
        while (answer := await self.send_request(max_tokens)) is not None and answer.status_code == 503:
            await asyncio.sleep(0.2)
        return answer

    async def ready(self) -> bool:
        """Return whether the gateway and its models are ready."""
        assert self.process.poll() is None, "the gateway ended"
        try:
            return (await self.client.get("/readyz?models=all")).status_code == 200
        except httpx2.TransportError:
            return False

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@dataclass
class Worker:
    """A worker that claims every job and completes it when allowed."""

    broker: redis.Redis
    replica: Replica
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    claimed: list[tuple[InferenceJob, int]] = field(default_factory=list)
    answered: list[ExecutionUsage] = field(default_factory=list)
    writes_text: bool = False

    async def run(self) -> None:
        while True:
            async for key in self.broker.scan_iter("millrace:claim:*", count=1000):
                await self._claim(key)
            if self.may_answer.is_set():
                while self.claimed:
                    await self._answer(*self.claimed.pop())
            await asyncio.sleep(0.02)

    async def _claim(self, key: bytes) -> None:
        attempt = await self.broker.hget(key, "attempt")  # type: ignore[misc]
        if attempt is None:  # it was stored for long enough after its end
            return
        found: Any = await self.broker.eval(claims.CLAIM, 1, key, attempt, self.replica.name, secrets.token_hex(8))  # type: ignore[misc]
        if found is not None:
            job = decode_job(found[0])
            reported = encode([Claimed(job.billing_context.request_id, int(attempt), self.replica.name)])
            await self.broker.xadd(gateway_stream(job.gateway_id), {"e": reported}, nomkstream=True)
            self.claimed.append((job, int(attempt)))

    def has_claimed(self, number: int) -> bool:
        """Return whether it has claimed this number of requests. A request that was sent again counts once."""
        return len({job.billing_context.request_id for job, _ in self.claimed}) >= number

    async def _answer(self, job: InferenceJob, attempt: int) -> None:
        """Complete the request with half of its maximum length.

        The vector and the text depend only on the prompt's length, so prompts of the same length are similar.
        """
        name = job.billing_context.request_id
        usage = TokenCounts(uncached=len(job.prompt_token_ids))
        events: list[Tokens | Vectors] = []
        if job.input_lengths:
            vector = [float(place == len(job.prompt_token_ids)) for place in range(VECTOR_SIZE)]
            events = [Vectors(name, attempt, 0, struct.pack(f"<{VECTOR_SIZE}f", *vector))]
        else:
            usage += TokenCounts(output=max(1, job.params.max_tokens // 2))
            if self.writes_text:
                events = [Tokens(name, attempt, 0, [5], "word " * len(job.prompt_token_ids), prompt=usage)]
        event = ExecutionUsage(job.billing_context, attempt, "completed", "stop", usage, self.replica.name, 32)
        end = End(name, attempt, len(events), "stop", None, usage)
        sent = [each for each in (*events, end) if not isinstance(each, Vectors)]  # those are only in the log
        keys = [claim_key(name, job.billing_context.execution), USAGE_STREAM, gateway_stream(job.gateway_id)]
        keys.append(event_log_key(name, attempt))
        self.answered.append(event)  # first, since the client may have the answer before this call returns
        await self.broker.eval(  # type: ignore[misc]
            claims.FINISH, 4, *keys, attempt, encode(event), encode(sent), 60, *map(encode, (*events, end))
        )


@dataclass
class GatewayCluster:
    gateways: dict[str, GatewayProcess]
    worker: Worker
    settler: subprocess.Popen[bytes]


@asynccontextmanager
async def gateway_cluster(
    broker: redis.Redis,
    database: str,
    key: str,
    names: Sequence[str],
    *,
    lease: float = LEASE_SECONDS,
    longest: int = REQUEST_SECONDS,
    recall: float | None = None,
    poll: float | None = None,
    similar: bool = False,
    **kill_at: str,
) -> AsyncIterator[GatewayCluster]:
    """Start gateways with these names, some of which die at a step, a settler, and the test's worker.

    Requests run for at most `longest` seconds, a recall waits `recall` seconds, and without a push a change is read
    after `poll` seconds. With `similar`, they compare questions, and the worker writes texts and vectors."""
    environ = os.environ | {
        "MILLRACE_DATABASE_URL": database,
        "MILLRACE_MODELS": f"{MODEL}=embedded,{EMBEDDING_MODEL}=embedded:minilm" if similar else f"{MODEL}=embedded",
        "MILLRACE_SEMANTIC_CACHE_WAIT_MS": "10000",
        "MILLRACE_REQUEST_TIMEOUT_SECONDS": str(longest),
        "CLUSTER_LEASE": str(lease),
        "CLUSTER_POLL": str(poll or revocation.POLL_SECONDS),
        "CLUSTER_RECALL": str(recall or budget_admission.REVOKE_LEASES_SECONDS),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "platform")]),
    }
    started: dict[str, GatewayProcess] = {}
    settler = _start("manage.py", "run_settler", "--name", "cluster", environ=environ)
    publish_bundles(parse_models(environ["MILLRACE_MODELS"]))
    (spec,) = parse_models(f"{MODEL}=embedded")
    worker = Worker(broker, Replica(broker, f"{MODEL}-0.stub", model=MODEL, version=spec.version))
    replicas = [worker.replica]
    if similar:
        worker.writes_text = True
        (embedding,) = parse_models(f"{EMBEDDING_MODEL}=embedded:minilm")
        replica = Replica(broker, f"{EMBEDDING_MODEL}-0.stub", model=EMBEDDING_MODEL, version=embedding.version)
        replicas.append(replica)
    working = asyncio.create_task(worker.run())
    try:
        for name in names:
            port = str(free_port())
            arguments = ("tests.support.gateway.killable_app:application", "--port", port, "--log-level", "warning")
            process = _start(
                *("-m", "uvicorn", *arguments, "--loop", "uvloop", "--http", HTTP_PROTOCOL, "--no-access-log"),
                environ=environ | ({"CLUSTER_KILL_AT": kill_at[name]} if name in kill_at else {}),
            )
            headers = {"authorization": f"Bearer {key}"}
            client = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120)
            started[name] = GatewayProcess(process, client)
        for gateway in started.values():
            await eventually_async(gateway.ready)
        yield GatewayCluster(started, worker, settler)
    finally:
        await cancel_and_wait([working, *(replica._task for replica in replicas)])
        for process in (settler, *(each.process for each in started.values())):
            process.send_signal(signal.SIGKILL)
            process.wait()
        for gateway in started.values():
            await gateway.client.aclose()
        await sync_to_async(lambda: connection.close())()


def _start(*arguments: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environ, preexec_fn=die_with_parent(signal.SIGKILL)
    )
