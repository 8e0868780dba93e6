"""Workers of one model that run in the test, and requests of tenants. The `replicas` fixture creates them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import redis

from inference_worker.contract.messages import (
    USAGE_STREAM,
    End,
    ExecutionUsage,
    InferenceJob,
    decode_event,
    decode_usage,
    event_log_key,
    pins_key,
)
from inference_worker.contract.request import CacheBreakpoint, TokenCounts
from inference_worker.contract.settings import WorkerSettings
from inference_worker.worker.worker import Worker, new_replica_id
from tests.support.engine.fakes import FakeRunner, distinct
from tests.support.waiting import eventually
from tests.support.worker.jobs import make_job

FIVE, HOUR = 300, 3600  # times of pins, in seconds
PROMPT = distinct(100, 1)
Queued = Callable[[InferenceJob], str]


class Replicas:
    """Workers of one model, and requests of tenants."""

    def __init__(self, broker: redis.Redis, queued: Queued, settings: WorkerSettings) -> None:
        self.broker = broker
        self.settings = settings
        self._queued = queued
        self._count = 0
        self.workers: list[Worker] = []
        self.runners: list[FakeRunner] = []

    def start(self, name: str) -> Worker:
        settings = replace(self.settings, worker_name=name)
        self.workers.append(Worker(settings, new_replica_id(settings)))
        return self.workers[-1]

    def stop(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.drain()
        worker.close()

    def job(self, prompt: list[int], *points: tuple[int, int], tenant: int = 1, tokens: int = 1) -> InferenceJob:
        self._count += 1
        job = make_job(f"req_{self._count}")
        return msgspec.structs.replace(
            job,
            billing_context=msgspec.structs.replace(job.billing_context, tenant_id=tenant),
            prompt_token_ids=prompt,
            params=msgspec.structs.replace(job.params, max_tokens=tokens, temperature=0.0, ignore_eos=True),
            cache_salt=f"of tenant {tenant}".encode(),
            breakpoints=tuple(CacheBreakpoint(*point) for point in points),
        )

    def queue(self, job: InferenceJob) -> tuple[str, int, int]:
        """Submit the job and its wakeup."""
        self.broker.hset(self._queued(job), "tenant", job.billing_context.tenant_id)
        return job.billing_context.request_id, 0, 1

    def run(self, worker: Worker, job: InferenceJob) -> None:
        """Run a request at the worker until its end is published."""
        assert worker.serve([self.queue(job)])
        eventually(lambda: self.is_billed(job))

    def usage_of(self, worker: Worker, prompt: list[int], *points: tuple[int, int], tenant: int = 1) -> TokenCounts:
        """Run a request and return its usage, which is also billed."""
        job = self.job(prompt, *points, tenant=tenant)
        self.run(worker, job)
        event = self.billed(job)
        last = decode_event(self.broker.lrange(event_log_key(job.billing_context.request_id, 1), -1, -1)[0])
        assert isinstance(last, End)
        assert last.usage == event.usage
        assert event.outcome == "completed"
        return event.usage

    def billed(self, job: InferenceJob) -> ExecutionUsage:
        (event,) = self._events(job)
        return event

    def is_billed(self, job: InferenceJob) -> bool:
        return bool(self._events(job))

    def is_pinned(self) -> bool:
        """Return whether a pin is stored in the broker within a few seconds."""
        give_up_at = time.monotonic() + 10
        while not (reported := self.broker.exists(pins_key(1))) and time.monotonic() < give_up_at:
            time.sleep(0.01)
        return bool(reported)

    def _events(self, job: InferenceJob) -> list[ExecutionUsage]:
        events = [decode_usage(fields[b"e"]) for _, fields in self.broker.xrange(USAGE_STREAM)]
        return [event for event in events if event.billing_context.request_id == job.billing_context.request_id]

    def pass_time(self, seconds: int, tenant: int = 1) -> None:
        """Move the expiry of all pins in the broker."""
        for block in self.broker.zrange(pins_key(tenant), 0, -1):
            self.broker.zincrby(pins_key(tenant), -2000 * seconds, block)


def logged_events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the events that were logged. structlog's own capture misses loggers of an earlier configuration."""
    return [record.msg["event"] for record in caplog.records if isinstance(record.msg, dict)]
