"""Reading of request bodies: small ones here, on the event loop, all others by a prompt process.

What a prompt process reads is charged to its tenant's request limits first, so that refused requests count too.
"""

from __future__ import annotations

import dataclasses

import msgspec

from millrace.gateway.admission.admission import Admission
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.prompt_processes.prompt_frames import PromptTask, Result, Target
from millrace.gateway.prompt_processes.prompt_pool import PromptPool
from millrace.gateway.protocols.dialect_readers import MAX_PROMPTS, READERS
from millrace.gateway.protocols.prompt_bounds import SMALL_BODY_BYTES, SMALL_PROMPT_COST, max_body_bytes, prompt_cost
from millrace.gateway.routing.router import Router
from tenants.keys.snapshot import ApiKeySnapshot


class PromptReader:
    """Turns bodies into requests whose prompts can be tokenized."""

    def __init__(self, router: Router, admission: Admission, pool: PromptPool, cap: int) -> None:
        """`cap`: the most bytes of any body."""
        self._router = router
        self._admission = admission
        self._pool = pool
        self._cap = cap

    def max_body_bytes(self, key: ApiKeySnapshot, reader: str) -> int:
        """Return how large a body may be that this key sends and this reader reads."""
        models = (model for models in self._router.usable_names(key).values() for model in models)
        return max_body_bytes(models, MAX_PROMPTS.get(reader, 1), self._cap)

    async def charge(self, key: ApiKeySnapshot, size: int) -> None:
        """Charge a body of this size to its tenant's request limits, if a prompt process is to read it.

        Raises:
            ApiError: 429, a limit does not allow it; 503, the limits cannot be read.
        """
        if size > SMALL_BODY_BYTES:
            await self._admission.charge(key)

    async def read(self, key: ApiKeySnapshot, reader: str, body: bytes) -> InferenceRequest:
        """Return the internal form of a body. A body that is not small was charged before.

        Raises:
            ApiError: 400, it is no proper request; 429 or 503, it cannot be read now.
        """
        if len(body) <= SMALL_BODY_BYTES:
            small = READERS[reader](body)
            if prompt_cost(small, len(body)) <= SMALL_PROMPT_COST:
                return small
            await self._admission.charge(key)
        names = self._router.usable_names(key)
        longest = {name: max(model.context_length for model in models) for name, models in names.items()}
        work = PromptTask(reader, {name: Target(models[0].name, longest[name]) for name, models in names.items()})
        result = await self.run(key, work, body)
        request = result.request
        if request is None:
            raise ApiError(OVERLOADED, "The process that tokenized your request failed.")
        if result.deployment is None:
            self._router.measure(key, request.model)  # raises: the key may not use this name
            raise ApiError(OVERLOADED, "The deployments of the model have changed.")
        models = names[request.model]
        kept = body if any(model.tokenizer is not models[0].tokenizer for model in models) else None
        return dataclasses.replace(request, tokenized=_ProcessedPrompts(self, key, work, kept, models[0], result))

    async def run(self, key: ApiKeySnapshot, work: PromptTask, body: bytes) -> Result:
        """Have a prompt process do the work.

        Raises:
            ApiError: as the reader's, or 429 or 503.
        """
        result = await self._pool.run(key.tenant_id, work, body)
        if result.problem is not None:
            raise result.problem.error()
        return result


class _ProcessedPrompts:
    """The prompts of one body, and the body itself where a deployment with another tokenizer may need it."""

    def __init__(
        self,
        reader: PromptReader,
        key: ApiKeySnapshot,
        work: PromptTask,
        body: bytes | None,
        model: ServedModel,
        result: Result,
    ) -> None:
        self._reader = reader
        self._key = key
        self._work = work
        self._body = body
        self._tokenizer = model.tokenizer
        self._prompts = [packed.unpack() for packed in result.prompts]

    async def prompt(self, model: ServedModel, number: int) -> Prompt:
        if model.tokenizer is not self._tokenizer and self._body is not None:
            work = msgspec.structs.replace(self._work, deployment=model.name)
            result = await self._reader.run(self._key, work, self._body)
            self._prompts = [packed.unpack() for packed in result.prompts]
            self._tokenizer = model.tokenizer
        return self._prompts[number]
