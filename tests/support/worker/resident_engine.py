"""A resident engine whose steps are controlled by the test."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from inference_worker.contract.messages import BillingContext, InferenceJob
from inference_worker.contract.request import (
    SamplingParams,
)
from inference_worker.worker.engine_client import ActiveJob, Delivery, ResidentEngine
from tests.support.engine.fakes import fake_engine


class Harness:
    """A resident engine whose steps each wait until the test allows them. Token n of a request is 100 + n."""

    def __init__(self) -> None:
        self.engine, runner = fake_engine(32, clock=time.monotonic, max_num_seqs=8, max_num_batched_tokens=64)
        self.allowed = threading.Semaphore(0)
        runner.during = self._wait
        self.delivered: queue.Queue[Delivery] = queue.Queue()
        self.broken = threading.Event()
        self.client = ResidentEngine(self.engine, self._deliver, self.broken.set)

    def _wait(self, _: object) -> None:
        self.allowed.acquire()

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self.delivered.put(delivery)

    def submit(
        self, name: str, prompt: int = 20, max_tokens: int = 5, n: int = 1, tenant: int = 1, **terms: Any
    ) -> ActiveJob:
        billing_context = BillingContext(1, name, 0, tenant, 1, 1, "m")
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, n=n)
        live = ActiveJob(
            InferenceJob(billing_context, "gw", list(range(prompt)), params, b"salt", time.time() + 60, **terms), 1
        )
        self.client.submit(live)
        return live

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.allowed.release()

    def next(self) -> Delivery:
        return self.delivered.get(timeout=60)
