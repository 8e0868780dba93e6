"""The start of an execution: admission to one target, the stages before the dispatch, and the dispatch."""

from __future__ import annotations

import dataclasses

import msgspec

from inference_worker.contract.request import ServiceClass
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest, RateLimitAdmission
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import Prompt
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution_ends import ExecutionEnds
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.execution_builder import ExecutionBuilder, with_prompt
from millrace.gateway.lifecycle.tokenizer import PromptTokenizer


class ExecutionStarter:
    """Starts the executions of one gateway."""

    def __init__(
        self,
        admission: RateLimitAdmission,
        dispatcher: Dispatcher,
        builder: ExecutionBuilder,
        tokenizer: PromptTokenizer,
        ends: ExecutionEnds,
    ) -> None:
        self._admission = admission
        self._dispatcher = dispatcher
        self._builder = builder
        self._tokenizer = tokenizer
        self.ends = ends

    async def admit_and_start(self, active: ActiveRequest) -> None:
        """Admit the request to its target, and start its execution.

        Raises:
            ApiError: the target cannot run it, and nothing is reserved.
        """
        active.reset_preparation()
        await active.stages.before_admission(active)
        await self._tokenizer.fit(active)
        key, request, model = active.key, active.request, active.served_target
        batch = request.service_class == ServiceClass.BATCH
        try:
            self._dispatcher.require_capacity(model.key, key.tenant_id, key.weight, batch=batch)
        except ApiError as exc:
            if not active.stages.may_answer:
                raise
            active.rejection = exc
        needs_prompts = request.echo or (request.more_prompts and request.sampling.logprobs is not None)
        prompts = await self._tokenizer.prompt_ids(model, active) if needs_prompts else None
        await self.start(active, await self._admit(active), prompts)

    async def start(
        self, active: ActiveRequest, admitted: AdmittedRequest, prompts: list[list[int]] | None = None
    ) -> None:
        """Serve an admitted execution from a stage, or dispatch it.

        Args:
            prompts: the tokens of all prompts, if the response needs more than those of the first.

        Raises:
            ApiError: it cannot run, and nothing is reserved.
        """
        execution = None
        try:
            execution = self._builder.build(active, admitted, prompts)
            execution.whole_prompt = active.whole_prompt
            if not await active.stages.before_dispatch(active, execution):
                if active.rejection is not None:
                    raise active.rejection
                self._dispatcher.submit(execution)
            elif execution.is_closed:  # a stage has failed when it could not run any more
                raise ApiError("internal_error", "The server had an internal error. Send the request again.")
        except BaseException:
            await self.ends.drop(admitted, execution)
            raise
        active.executions.append(execution)
        active.reset_preparation()

    async def _admit(self, active: ActiveRequest) -> AdmittedRequest:
        """Reserve what the request may need, with room for the spare tokens if that fits the limits."""
        demand = AdmissionRequest(
            active.request_id,
            active.admitted_at,
            active.key,
            active.request,
            active.prompt,
            [active.served_target, *active.remaining_candidates],
            len(active.executions),
        )
        if active.spare_tokens:
            prompt = add_spare_tokens(active.prompt, active.spare_tokens)
            try:
                admitted = await self._admission.admit(msgspec.structs.replace(demand, prompt=prompt))
            except ApiError as exc:
                active.spare_tokens, active.spare_refusal, active.whole_prompt = 0, exc.code, None
            else:
                return with_prompt(admitted, active.prompt)
        return await self._admission.admit(demand)


def add_spare_tokens(prompt: Prompt, tokens: int) -> Prompt:
    """Return a prompt with placeholders for tokens that a stage may add, for its reservation."""
    return dataclasses.replace(prompt, ids=prompt.ids + prompt.ids[-1:] * tokens)
