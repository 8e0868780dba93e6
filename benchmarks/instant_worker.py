"""A Celery worker as `python -m inference_worker` starts it, with an engine that responds immediately.

    MILLRACE_INSTANT_PACE=0 python -m benchmarks.instant_worker

With a pace of 0 the whole output is delivered when the request is submitted. Otherwise the pace is the number of steps
per second, and each step gives every request one token. A token's text is the monotonic clock in nanoseconds.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import inference_worker.worker.worker
from inference_worker.__main__ import main
from inference_worker.contract.metric_families import MetricsSnapshot
from inference_worker.contract.request import RequestError, RequestOutput, TokenCounts
from inference_worker.engine.engine import EngineStats
from inference_worker.worker.engine_client import ActiveJob, Deliver, Requeued

PACE = float(os.environ.pop("MILLRACE_INSTANT_PACE", "0"))
TEXTS = ("The answer is always the same.", "Paris, 1984!")  # by the parity of the prompt's length


class InstantEngine:
    """An `EngineClient` that computes nothing."""

    def __init__(self, engine: Any, deliver: Deliver, on_broken: Any) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        self._live: dict[str, tuple[ActiveJob, int]] = {}  # with the number of its tokens
        self._closing = threading.Event()
        if PACE:
            threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, live: ActiveJob) -> None:
        if PACE:
            with self._lock:
                self._live[live.engine_id] = (live, 0)
            return
        count = live.job.params.max_tokens
        text = TEXTS[len(live.job.prompt_token_ids) % len(TEXTS)]
        self._deliver([(live, self._output(live, text, count, count))])

    def cancel(self, live: ActiveJob, failure: RequestError | None = None) -> None:
        with self._lock:
            found = self._live.pop(live.engine_id, None)
        if found is not None:
            usage = self._usage(live, found[1])
            self._deliver([(live, failure or RequestOutput(live.engine_id, finish_reason="cancelled", usage=usage))])

    def requeue(self, live: ActiveJob) -> None:
        with self._lock:
            fresh = self._live.get(live.engine_id, (live, 1))[1] == 0 and self._live.pop(live.engine_id)
        if fresh:
            self._deliver([(live, Requeued())])

    def live(self) -> list[ActiveJob]:
        with self._lock:
            return [live for live, _ in self._live.values()]

    def prefix_digest(self) -> None:
        """Return None: there is no prefix cache."""

    def stats(self) -> EngineStats:
        counts: Any = dict.fromkeys((field.name for field in fields(EngineStats)), 0)
        return EngineStats(**counts | {"num_running": len(self._live), "circuit_open": False})

    def metrics(self) -> MetricsSnapshot:
        """Return empty metrics."""
        return MetricsSnapshot({}, {}, {})

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        step = time.monotonic()
        while not self._closing.is_set():
            step += 1 / PACE
            time.sleep(max(0.0, step - time.monotonic()))
            outputs: list[Any] = []
            with self._lock:
                for name, (live, had) in list(self._live.items()):
                    limit = live.job.params.max_tokens
                    outputs.append((live, self._output(live, f"{time.monotonic_ns()} ", 1, had + 1, limit)))
                    self._live[name] = (live, had + 1)
                    if had + 1 >= limit:
                        del self._live[name]
            if outputs:
                self._deliver(outputs)

    def _output(self, live: ActiveJob, text: str, new: int, had: int, limit: int = 0) -> RequestOutput:
        done = had >= limit
        usage = self._usage(live, had) if done else None
        return RequestOutput(live.engine_id, [1] * new, text, "length" if done else None, usage=usage)

    def _usage(self, live: ActiveJob, output: int) -> TokenCounts:
        return TokenCounts(uncached=len(live.job.prompt_token_ids), output=output)


inference_worker.worker.worker.ENGINES["generation"] = lambda config: SimpleNamespace(slow=None)  # type: ignore[return-value, assignment]
inference_worker.worker.worker.ResidentEngine = InstantEngine  # type: ignore[misc, assignment]

if __name__ == "__main__":
    main()
