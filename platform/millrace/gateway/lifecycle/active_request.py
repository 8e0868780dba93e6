"""One prompt of a request, from its routing to its end."""

from __future__ import annotations

import asyncio
import contextlib
import time

from inference_worker.contract.request import TokenCounts
from millrace.gateway.answer_cache.semantic_cache import Question
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt, ResponseSpec, Writer
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.lifecycle.stage import RequestStages
from millrace.gateway.protocols.writers import make_writer
from millrace.gateway.routing.retry_budgets import RetryBudgets
from millrace.gateway.routing.router import Route
from tenants.keys.snapshot import ApiKeySnapshot

USAGE_SECONDS = 0.5  # how long an error event waits for the usage of a cancelled request
USAGE_POLL_SECONDS = 0.01
# Failure -> condition in a routing policy. Other failures depend on the request and are the same for every model. A
# request that was lost with several workers (`not_served`) is not sent to another model, whose workers it could end.
FALLBACK = {
    OVERLOADED: "overload",
    "model_loading": "overload",
    "upstream_limit_reached": "overload",
    "worker_lost": "error",
    "internal_error": "error",
    "upstream_error": "error",
    "context_length_exceeded": "context",
    "rate_limit_exceeded": "rate_limit",
    "first_token_timeout": "timeout",
}


class ActiveRequest:
    """One prompt of a request, with its executions."""

    def __init__(
        self,
        key: ApiKeySnapshot,
        request: InferenceRequest,
        dialect: str,
        request_id: str,
        prompt: Prompt,
        counting_model: ServedModel,
        route: Route,
        retry_budgets: RetryBudgets,
        stages: RequestStages,
    ) -> None:
        self.key = key
        self.request = request
        self.dialect = dialect
        self.request_id = request_id
        self.prompt = prompt
        self.tokenization = counting_model.tokenization
        self.route = route
        self.remaining_candidates = list(route.candidates)
        self.target: ServedModel | None = None  # the deployment of the current execution, or the last that was tried
        self.decision_record = route.decision_record
        self.admitted_at = time.time_ns() // 1000
        self.started_at = time.monotonic()
        self.further_prompts: list[ActiveRequest] = []  # one for each further prompt
        self.executions: list[Execution] = []  # the last one is current
        self.fallbacks = 0
        self.stages = stages
        self.side_executions: list[Execution] = []  # executions of stages that are billed with the request
        self.rejection: ApiError | None = None  # the next execution runs only if a stage serves it
        self.spare_tokens = 0  # tokens to reserve for what a stage adds to the prompt of the next execution
        self.spare_refusal = ""  # code of the error if they were not reserved
        self.whole_prompt: list[int] | None = None  # tokens of a conversation of which a part is to be summarized
        self.keeps_answer = True  # its answer has passed all checks
        self.question: Question | None = None  # its lookup in the semantic cache
        self._retry_budgets = retry_budgets

    @property
    def execution(self) -> Execution:
        """Return the current execution."""
        return self.executions[-1]

    @property
    def served_target(self) -> ServedModel:
        """Return the target that is tried."""
        if self.target is None:
            raise AssertionError("no target was tried")
        return self.target

    @property
    def model(self) -> str:
        """Return the name of the current deployment; empty if none was tried."""
        return "" if self.target is None else self.target.name

    async def response_spec(self) -> ResponseSpec:
        """Return the response spec of the current execution."""
        return self.execution.response_spec

    def writer(self) -> Writer:
        return make_writer(self.execution.response_spec, self.execution.admitted.demand.model.tokenizer)

    async def final_usage(self) -> TokenCounts | None:
        """Wait shortly until a cancelled request's usage is known, and return it with that of its further prompts."""
        executions = [part.execution for part in (self, *self.further_prompts)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(USAGE_SECONDS):
                while any(execution.usage is None for execution in executions):
                    await asyncio.sleep(USAGE_POLL_SECONDS)
        usages = [execution.usage for execution in executions if execution.usage is not None]
        return sum(usages, TokenCounts()) if len(usages) == len(executions) else None

    def take_fallback(self, error: ApiError) -> bool:
        """Count a fallback after this failure, if the routing policy allows it. Return whether it does."""
        policy = self.route.policy
        if policy is None or not self.falls_back(FALLBACK.get(error.code, "")):
            return False
        if not self._retry_budgets.take((self.key.tenant_id, self.request.model), policy.retries.max_percent):
            self.decision_record.retry_budget = "used up"
            return False
        self.fallbacks += 1
        return True

    def falls_back(self, condition: str) -> bool:
        """Return whether another candidate follows under a condition of the routing policy."""
        policy = self.route.policy
        if policy is None or not self.remaining_candidates or condition not in self.route.fallback_on:
            return False
        return self.fallbacks < policy.retries.max_per_request

    @property
    def first_token_seconds(self) -> float | None:
        """The time after which the current execution is replaced if it has no token; None: no limit."""
        policy, answer = self.route.policy, self.execution.answer
        if policy is None or policy.first_token_ms is None or not self.falls_back("timeout"):
            return None
        return None if answer is not None and answer.layer else policy.first_token_ms / 1000

    @property
    def ignored(self) -> tuple[str, ...]:
        """The request's fields that have no effect with the current deployment."""
        return self.request.analysis.ignored if self.prompt.ignored is None else self.prompt.ignored

    def reset_preparation(self) -> None:
        """Forget what was prepared for the last execution."""
        self.rejection, self.whole_prompt = None, None
        self.spare_tokens, self.spare_refusal = 0, ""

    def replace_route(self, route: Route) -> None:
        """Replace the route before its first target is tried."""
        self.route, self.decision_record = route, route.decision_record
        self.target, *self.remaining_candidates = route.candidates

    def make_current(self, execution: Execution) -> None:
        """Make an earlier execution the one that the response is written from."""
        self.executions.remove(execution)
        self.executions.append(execution)
        self.target, self.prompt = execution.admitted.demand.model, execution.admitted.demand.prompt

    def skip(self, error: ApiError) -> None:
        """Record why a candidate did not run the request."""
        self.decision_record.skip(self.model, error.code)
