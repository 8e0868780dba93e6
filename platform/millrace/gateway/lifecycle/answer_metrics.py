"""What the lifecycle of requests adds to the gateway's metrics and to the measures of its router."""

from __future__ import annotations

from inference_worker.contract.request import TOKEN_CLASSES
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.routing.signals import LatencyTracker


class AnswerMetrics:
    """The measurements of one gateway's answers."""

    def __init__(self, metrics: GatewayMetrics, latencies: LatencyTracker) -> None:
        self._metrics = metrics
        self._latencies = latencies

    def count_in_flight(self, dispatcher: Dispatcher) -> None:
        """Set the number of running executions."""
        self._metrics.in_flight.set(dispatcher.in_flight)

    def record_first_token(self, active: ActiveRequest, execution: Execution) -> None:
        """Record the time of an execution's first token, if it has one."""
        at = execution.first_token_at
        if at is None:
            return
        self._metrics.time_to_first_token.labels(execution.model).observe(at - active.started_at)
        if not execution.batch and (execution.answer is None or not execution.answer.layer):
            self._latencies.record(execution.model, at - execution.created_at)

    def count_answers(self, active: ActiveRequest) -> None:
        """Count the answers of an ended request, and their tokens."""
        for execution in (*active.side_executions, *active.executions):
            if execution.usage is None:
                continue
            for token_class in TOKEN_CLASSES:
                if tokens := getattr(execution.usage, token_class):
                    self._metrics.tokens.labels(execution.model, token_class).inc(tokens)
            self._metrics.answers.labels(execution.model, execution.cache_layer).inc()
