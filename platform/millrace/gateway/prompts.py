"""From what a caller sent to token ids, and where in them a cached prefix is to end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from inference_worker.engine.chat_template import ChatTemplateError
from inference_worker.engine.request import CacheBreakpoint
from millrace.gateway import tools
from millrace.gateway.catalogue import ServedModel
from millrace.gateway.errors import ApiError, invalid
from millrace.gateway.forms import Breakpoint, InferenceRequest

LONG_PROMPT_CHARACTERS = 4_000  # above this, tokenising would hold up the event loop


@dataclass(frozen=True)
class Prompt:
    """A request's prompt in a model's tokens."""

    ids: list[int]
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    input_lengths: tuple[int, ...] = ()  # of what is to be embedded, the inputs' parts of the ids


async def tokenise(model: ServedModel, request: InferenceRequest) -> Prompt:
    """The prompt in the model's tokens.

    Raises:
        ApiError: 400, it is no prompt for this model.
    """
    if request.inputs:
        return await _tokenise_inputs(model, request)
    if model.vector_sizes:
        raise invalid("model", f"The model {model.name!r} embeds: it is for /v1/embeddings alone.")
    prompt = request.prompt
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
        ids = [item for item in prompt if isinstance(item, int)]
        _check_ids(model, ids, "prompt")
        return Prompt(ids)
    size = len(prompt) if isinstance(prompt, str) else sum(len(m["content"]) for m in prompt if isinstance(m, dict))
    if size > LONG_PROMPT_CHARACTERS or request.tools or request.breakpoints:
        return await asyncio.to_thread(_encode, model, request)
    return _encode(model, request)


async def _tokenise_inputs(model: ServedModel, request: InferenceRequest) -> Prompt:
    if not model.vector_sizes:
        raise invalid("model", f"The model {model.name!r} does not embed.")
    wanted = request.asked.get("dimensions")
    if wanted is not None and wanted not in model.vector_sizes:
        sizes = " or ".join(map(str, model.vector_sizes))
        raise invalid("dimensions", f"Vectors of the model {model.name!r} have {sizes} dimensions, not {wanted}.")
    if sum(map(len, request.inputs)) > LONG_PROMPT_CHARACTERS:
        return await asyncio.to_thread(_encode_inputs, model, request.inputs)
    return _encode_inputs(model, request.inputs)


def _encode_inputs(model: ServedModel, inputs: tuple[str | list[int], ...]) -> Prompt:
    ids: list[int] = []
    lengths: list[int] = []
    for index, each in enumerate(inputs):
        found = model.tokenizer.encode(each) if isinstance(each, str) else each
        if not found:
            raise invalid("input", f"Input {index} is empty: it must hold at least one token.")
        if len(found) > model.context_length:
            most = f"This model takes inputs of at most {model.context_length} tokens"
            raise ApiError("context_length_exceeded", f"{most}, but input {index} has {len(found)}.", "input")
        ids += found
        lengths.append(len(found))
    _check_ids(model, ids, "input")
    return Prompt(ids, input_lengths=tuple(lengths))


def _check_ids(model: ServedModel, ids: list[int], param: str) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < model.vocab_size:
        raise invalid(param, f"Token ids of this model are from 0 to {model.vocab_size - 1}.")


def _encode(model: ServedModel, request: InferenceRequest) -> Prompt:
    if isinstance(request.prompt, str):
        return Prompt(model.tokenizer.encode(request.prompt))
    messages: list[dict[str, Any]] = request.prompt  # type: ignore[assignment]
    told = [tools.template_tool(tool) for tool in request.tools] if request.tool_choice != "none" else []
    try:
        ids = _render(model, messages, told)
    except ChatTemplateError as fault:
        raise invalid("messages", str(fault)) from None
    found = (_place(model, messages, told, ids, breakpoint) for breakpoint in request.breakpoints)
    return Prompt(ids, tuple(place for place in found if place is not None))


def _render(
    model: ServedModel, messages: list[dict[str, Any]], told: list[dict[str, Any]], *, whole: bool = True
) -> list[int]:
    tokenizer = model.tokenizer
    if not tokenizer.template_takes_tools:
        return tokenizer.apply_chat_template(tools.in_words(messages, told), None, whole)
    return tokenizer.apply_chat_template(messages, told or None, whole)


def _place(
    model: ServedModel, messages: list[dict[str, Any]], told: list[dict[str, Any]], ids: list[int], at: Breakpoint
) -> CacheBreakpoint | None:
    """The breakpoint in tokens: as far as the prompt agrees with one that ends, or goes on otherwise, there."""
    if at.tools is not None and at.tools < len(told):
        other = messages, told[: at.tools]
    elif at.tools is not None or not at.messages:
        other = [{**message, "content": "\0"} for message in messages], told
    else:
        kept = messages[: at.messages]
        if at.characters is not None:
            kept[-1] = {**kept[-1], "content": kept[-1]["content"][: at.characters]}
        other = kept, told
    try:
        ending = _render(model, *other, whole=False)
    except ChatTemplateError:
        return None  # a template that wants the whole conversation: then there is no such place
    same = next((n for n, (a, b) in enumerate(zip(ids, ending, strict=False)) if a != b), min(len(ids), len(ending)))
    return CacheBreakpoint(same, at.seconds) if same else None
