"""A relay without a worker, and the outcomes of its executions."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from inference_worker.contract import valkey
from inference_worker.contract.messages import BillingContext, InferenceJob
from inference_worker.contract.request import SamplingParams
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamRequest, UpstreamSpec
from inference_worker.worker.engine_client import ActiveJob, Delivery, Outcome, is_last
from inference_worker.worker.relay.relay import Relay
from tests.support.upstreams.protocol_server import ProtocolServer

SECRET = "sk-of-the-operator"
OPENAI, ANTHROPIC = UpstreamEngine.OPENAI, UpstreamEngine.ANTHROPIC
BODY = b'{"messages":[{"role":"user","content":"Hi"}]}'


class Keys:
    """Credentials in memory."""

    def __init__(self, max_concurrency: int | None) -> None:
        self._max_concurrency = max_concurrency

    def secret(self, credential_id: int) -> str:
        return {7: SECRET, 8: "sk-of-a-tenant"}[credential_id]

    def max_concurrency(self, credential_id: int) -> int | None:
        return self._max_concurrency


class Harness:
    """A relay with its outcomes by request."""

    def __init__(self, server: ProtocolServer, engine: UpstreamEngine, **fields: Any) -> None:
        """Start a relay. `valkey_url`: where it shares limits. `max_concurrency`: of its credentials."""
        self.engine = engine
        keys, url = Keys(fields.pop("max_concurrency", None)), fields.pop("valkey_url", None)
        broker = None if url is None else valkey.connect_async(url, valkey.WORKER)
        fields = {"preset": engine.value, "credential": 7, "allow_internal": True, **fields}
        upstream = UpstreamSpec(engine, fields.pop("base_url", server.url), "model-x", **fields)
        self._delivered: queue.Queue[Delivery] = queue.Queue()
        self.broken = threading.Event()
        spec = ModelSpec("m", server.url, "auto", upstream=upstream)
        self.relay = Relay(spec, keys, self._deliver, self.broken.set, broker)

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._delivered.put(delivery)

    def submit(
        self,
        name: str = "r",
        *,
        n: int = 1,
        seconds: float = 60,
        waits: bool = True,
        credential: int | None = None,
        tenant: int = 1,
        operation: str = "",
    ) -> ActiveJob:
        operation = operation or ("messages" if self.engine == ANTHROPIC else "chat")
        request = UpstreamRequest(operation, BODY, 100, 25, waits)  # type: ignore[arg-type]
        context = BillingContext(1, name, 0, tenant, 1, 1, "m")
        params = SamplingParams(max_tokens=50, n=n)
        deadline = time.time() + seconds
        chosen = {"credential": credential, "is_tenant_credential": credential == 8}
        lengths = (1,) if operation == "embeddings" else ()
        job = InferenceJob(context, "gw", [], params, b"", deadline, upstream=request, input_lengths=lengths, **chosen)  # type: ignore[arg-type]
        live = ActiveJob(job, 1)
        self.relay.submit(live)
        return live

    def next(self) -> Outcome:
        return self._delivered.get(timeout=30)[1]

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes up to the last one of an execution."""
        found = [self.next()]
        while not is_last(found[-1]):
            found.append(self.next())
        return found

    def run(self, **fields: Any) -> list[Outcome]:
        self.submit(**fields)
        return self.outcomes()
