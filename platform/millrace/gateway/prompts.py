"""From what a caller sent to token ids."""

from __future__ import annotations

import asyncio
from typing import Any

from inference_worker.engine.chat_template import ChatTemplateError
from millrace.gateway.catalogue import ServedModel
from millrace.gateway.errors import invalid

LONG_PROMPT_CHARACTERS = 4_000  # above this, tokenising would hold up the event loop


async def tokenise(model: ServedModel, prompt: list[dict[str, Any]] | str | list[int]) -> list[int]:
    """The prompt in the model's tokens.

    Raises:
        ApiError: 400, it is no prompt for this model.
    """
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
        ids = [item for item in prompt if isinstance(item, int)]
        if any(not 0 <= token_id < model.vocab_size for token_id in ids):
            raise invalid("prompt", f"Token ids of this model are from 0 to {model.vocab_size - 1}.")
        return ids
    size = len(prompt) if isinstance(prompt, str) else sum(len(m["content"]) for m in prompt if isinstance(m, dict))
    if size > LONG_PROMPT_CHARACTERS:
        return await asyncio.to_thread(_encode, model, prompt)
    return _encode(model, prompt)


def _encode(model: ServedModel, prompt: object) -> list[int]:
    try:
        if isinstance(prompt, str):
            return model.tokenizer.encode(prompt)
        return model.tokenizer.apply_chat_template(prompt)  # type: ignore[arg-type]
    except ChatTemplateError as fault:
        raise invalid("messages", str(fault)) from None
