"""Reading of request bodies: small ones on the event loop, larger ones in a prompt process.

A body for a prompt process is charged to its tenant's request limits first, so that rejected requests also count.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from millrace.gateway.admission.admission import RateLimitAdmission
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt, RequestSource
from millrace.gateway.prompt_processes.prompt_frames import PromptTarget, PromptTask, Result
from millrace.gateway.prompt_processes.prompt_pool import PromptPool
from millrace.gateway.protocols.context_overflow import MAX_OVERFLOW
from millrace.gateway.protocols.dialect_readers import MAX_PROMPTS, READERS
from millrace.gateway.protocols.prompt_bounds import SMALL_BODY_BYTES, SMALL_PROMPT_COST, max_body_bytes, prompt_cost
from millrace.gateway.protocols.prompts import may_render_here
from millrace.gateway.protocols.unknown_fields import check_unknown
from millrace.gateway.protocols.upstreams.images import has_images
from millrace.gateway.routing.router import Router, counting_model
from tenants.keys.snapshot import ApiKeySnapshot, UnknownParameters


class PromptReader:
    """Reads bodies into requests whose prompts can be tokenized."""

    def __init__(
        self,
        router: Router,
        admission: RateLimitAdmission,
        pool: PromptPool,
        max_bytes: int,
        unknown_parameters: UnknownParameters = "warn",
    ) -> None:
        """Create a reader.

        Args:
            max_bytes: the maximum size of any body.
            unknown_parameters: applies to tenants without a setting of their own.
        """
        self._router = router
        self._admission = admission
        self._pool = pool
        self._max_bytes = max_bytes
        self._unknown_parameters: UnknownParameters = unknown_parameters

    def max_body_bytes(self, key: ApiKeySnapshot, reader: str) -> int:
        """Return the maximum size in bytes of a body that this key may send to this reader."""
        models = (model for models in self._router.usable_names(key).values() for model in models)
        return max_body_bytes(models, MAX_PROMPTS.get(reader, 1), self._max_bytes)

    async def charge(self, key: ApiKeySnapshot, size: int) -> None:
        """Charge a body of this size to its tenant's request limits, if a prompt process will read it.

        Raises:
            ApiError: 429, a limit is reached; 503, the limits cannot be read.
        """
        if size > SMALL_BODY_BYTES:
            await self._admission.charge(key)

    async def read(self, key: ApiKeySnapshot, reader: str, body: bytes) -> InferenceRequest:
        """Return the internal form of a body. Larger bodies must be charged before.

        Raises:
            ApiError: 400, the request is invalid; 429 or 503, it cannot be read now.
        """
        if len(body) <= SMALL_BODY_BYTES:
            small_request = READERS[reader](body)
            self._check_unknown(key, small_request)
            if prompt_cost(small_request, len(body)) <= SMALL_PROMPT_COST and self._may_render_here(key, small_request):
                source = RequestSource(reader, body) if self._router.may_leave(key, small_request.model) else None
                in_process = _ProcessedPrompts(self, key, lambda: self._task(key, reader), body)
                return small_request.change_analysis(source=source, in_process=in_process)
            await self._admission.charge(key)
        names = self._router.usable_names(key)
        work = self._task(key, reader)
        result = await self.run(key, work, body)
        request = result.request
        if request is None:
            raise ApiError(OVERLOADED, "The process that tokenized your request failed. Retry later.")
        self._check_unknown(key, request)
        if result.deployment is None:
            self._router.measure(key, request.model)  # raises if the key may not use this name
            raise ApiError(OVERLOADED, "The deployments of the model have changed. Retry later.")
        models = names[request.model]
        counting = next((model for model in models if model.key == result.deployment), models[0])
        shadow = self._router.shadow_model(key, request.model)
        others = models if shadow is None else [*models, shadow]
        may_differ = any(model.tokenization != counting.tokenization for model in others)
        body_to_retain = body if may_differ or _drops_messages(key, request.model) else None
        prompts = _ProcessedPrompts(self, key, lambda: work, body_to_retain, counting, result)
        return request.change_analysis(tokenized=prompts)

    def _task(self, key: ApiKeySnapshot, reader: str) -> PromptTask:
        names = self._router.usable_names(key)
        return PromptTask(
            reader,
            {name: _target(key, name, models) for name, models in names.items()},
            semantic_names=tuple(name for name in names if key.serves_similar(name)),
        )

    def _may_render_here(self, key: ApiKeySnapshot, request: InferenceRequest) -> bool:
        try:
            model = self._router.measure(key, request.model, has_images=has_images(request))
        except ApiError:  # it is raised again when the request is admitted
            return True
        return may_render_here(model, request)

    def _check_unknown(self, key: ApiKeySnapshot, request: InferenceRequest) -> None:
        check_unknown(key.unknown_parameters or self._unknown_parameters, request.analysis.unknown)

    async def run(self, key: ApiKeySnapshot, work: PromptTask, body: bytes) -> Result:
        """Let a prompt process read the body.

        Raises:
            ApiError: an error of the reader, or 429 or 503 of the pool.
        """
        result = await self._pool.run(key.tenant_id, work, body)
        if result.problem is not None:
            raise result.problem.error()
        return result


def _target(key: ApiKeySnapshot, name: str, models: list[ServedModel]) -> PromptTarget:
    """Return the deployment that tokenizes prompts for a model name, and the longest prompt that it accepts."""
    longest = max(model.context_length for model in models)
    if _drops_messages(key, name):
        longest *= MAX_OVERFLOW
    with_images = counting_model(models, has_images=True)
    return PromptTarget(models[0].key, longest, "" if with_images is models[0] else with_images.key)


def _drops_messages(key: ApiKeySnapshot, name: str) -> bool:
    policy = key.policies.get(name)
    return policy is not None and policy.context_overflow != "refuse"


class _ProcessedPrompts:
    """The prompts of one body, and the body itself if it was not read yet, or another tokenizer may need it."""

    def __init__(
        self,
        reader: PromptReader,
        key: ApiKeySnapshot,
        task: Callable[[], PromptTask],
        body: bytes | None,
        model: ServedModel | None = None,
        result: Result | None = None,
    ) -> None:
        self._reader = reader
        self._key = key
        self._task = task
        self._body = body
        self._tokenization = None if model is None else model.tokenization
        self._prompts = [] if result is None else [packed.unpack() for packed in result.prompts]

    async def prompt(self, model: ServedModel, number: int) -> Prompt:
        if model.tokenization != self._tokenization and self._body is not None:
            work = msgspec.structs.replace(self._task(), deployment=model.key)
            result = await self._reader.run(self._key, work, self._body)
            self._prompts = [packed.unpack() for packed in result.prompts]
            self._tokenization = model.tokenization
        return self._prompts[number]

    async def summary_prompt(self, model: ServedModel, number: int, dropped: int) -> Prompt:
        if self._body is None:
            raise ApiError(OVERLOADED, "The routing policy has changed. Send the request again.")
        work = msgspec.structs.replace(self._task(), deployment=model.key, summarizes=dropped)
        result = await self._reader.run(self._key, work, self._body)
        return result.prompts[number].unpack()

    async def shorten(self, model: ServedModel, number: int, max_tokens: int, summary: str = "") -> Prompt:
        if self._body is None:  # the policy has changed meanwhile
            return self._prompts[number]
        work = msgspec.structs.replace(self._task(), deployment=model.key, fits_tokens=max_tokens, summary=summary)
        result = await self._reader.run(self._key, work, self._body)
        return result.prompts[number].unpack()
