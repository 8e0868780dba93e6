"""The execution of an admitted request on its target: its job and its response spec."""

from __future__ import annotations

from typing import Any

import msgspec
import redis.asyncio as redis
from msgspec import UNSET

from millrace.gateway.admission.admission import AdmittedRequest
from millrace.gateway.core.types import Prompt, ResponseSpec
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.protocols.tools import call_fields


class ExecutionBuilder:
    """Builds the executions of one gateway."""

    def __init__(self, broker: redis.Redis, jobs: InferenceJobBuilder) -> None:
        self._broker = broker
        self._jobs = jobs

    def build(self, active: ActiveRequest, admitted: AdmittedRequest, prompts: list[list[int]] | None) -> Execution:
        """Return an execution of the request.

        Args:
            prompts: the tokens of all prompts, if the response needs more than those of the first.
        """
        request = active.request
        defaults = request.analysis.defaults_of(admitted.demand.model)
        active.decision_record.sampling_defaults = defaults or UNSET  # instead of those of a model that failed
        if active.prompt.truncated_inputs:
            active.decision_record.truncated_inputs = active.prompt.truncated_inputs
        response_spec = ResponseSpec(
            active.dialect,
            active.request_id,
            active.model,
            active.admitted_at // 1_000_000,
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            service_class=request.service_class,
            n=request.sampling.n,
            prompts=1 + len(request.more_prompts),
            echo=prompts if request.echo else None,
            echoed_parameters=request.echoed_parameters
            | {name: value for name, value in defaults.items() if name in request.echoed_parameters},
            checked=request.analysis.checked,
            shows_special_tokens=not request.sampling.skip_special_tokens,
            **_prompt_fields(active.prompt, prompts),
            **call_fields(request, admitted.demand.model),
        )
        return Execution(
            self._broker,
            admitted,
            self._jobs.make(admitted, waits_for_capacity=not active.falls_back("overload")),
            response_spec,
            active.decision_record,
            active.execution.attempt + 1 if active.executions else 1,
        )

    def set_prompt(self, active: ActiveRequest, execution: Execution) -> None:
        """Give an execution that was not dispatched the request's current prompt, for which enough is reserved."""
        admitted = with_prompt(execution.admitted, active.prompt)
        execution.set_job(
            admitted,
            self._jobs.make(admitted, waits_for_capacity=not active.falls_back("overload")),
            msgspec.structs.replace(execution.response_spec, **_prompt_fields(active.prompt, None)),
        )


def with_prompt(admitted: AdmittedRequest, prompt: Prompt) -> AdmittedRequest:
    """Return the admission of a shorter prompt. What is reserved for the longer one does not change."""
    changed = msgspec.structs.replace(admitted, demand=msgspec.structs.replace(admitted.demand, prompt=prompt))
    vars(changed).clear()  # `replace` copies cached properties
    return changed


def _prompt_fields(prompt: Prompt, prompts: list[list[int]] | None) -> dict[str, Any]:
    """Return the fields of a response spec that depend on the prompt."""
    return {
        "prompt_tokens": prompt.expected_tokens,
        "truncated": prompt.truncated,
        "last_prompt_ids": [ids[-1] if ids else None for ids in prompts or [prompt.ids]],
    }
