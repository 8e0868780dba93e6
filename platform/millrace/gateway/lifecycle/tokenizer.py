"""The tokenization of prompts on the gateway's event loop, or the wait for the prompt process that does it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.protocols.prompts import is_short, tokenize

if TYPE_CHECKING:
    from millrace.gateway.lifecycle.active_request import ActiveRequest


class PromptTokenizer:
    """The tokenizer of one gateway's requests."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def tokenize(self, model: ServedModel, request: InferenceRequest) -> Prompt:
        """Return the prompt in the model's tokens.

        Prompts that are tokenized on the event loop are separated by an iteration of the loop, unless they are short.

        Raises:
            ApiError: 400, the prompt is invalid for the model.
        """
        if request.analysis.tokenized is not None or is_short(request):
            return await tokenize(model, request)
        async with self._lock:  # not while a prompt process works
            await asyncio.sleep(0)
        return await tokenize(model, request)

    async def fit(self, active: ActiveRequest) -> None:
        """Tokenize the prompt again if the target of the request has other tokens.

        Raises:
            ApiError: 400, the prompt is invalid for the target.
        """
        model = active.target
        if model is not None and model.tokenization != active.tokenization:
            active.prompt, active.tokenization = await self.tokenize(model, active.request), model.tokenization

    async def prompt_ids(self, model: ServedModel, active: ActiveRequest) -> list[list[int]]:
        """Return the tokens of all prompts of a request."""
        others = [active.request.select_prompt(number) for number in range(1, 1 + len(active.request.more_prompts))]
        return [active.prompt.ids, *[(await self.tokenize(model, other)).ids for other in others]]
