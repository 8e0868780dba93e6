"""From what a caller sent to token ids, and where in them a cached prefix is to end."""

from __future__ import annotations

from typing import Any

from inference_worker.contract.chat_template import ChatTemplateError
from inference_worker.contract.request import CacheBreakpoint
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import Breakpoint, InferenceRequest, Prompt
from millrace.gateway.protocols import tools
from millrace.gateway.protocols.prompt_bounds import max_characters, too_long

PIECE_CHARACTERS = 2**16
DENSE = 2  # a prompt whose first pieces have this multiple of the context's tokens is rejected


async def tokenize(model: ServedModel, request: InferenceRequest) -> Prompt:
    """Tokenize the prompt: a small one immediately, any other one in a prompt process.

    Raises:
        ApiError: 400, it is no prompt for this model.
    """
    if request.tokenized is not None:
        return await request.tokenized.prompt(model, request.number)
    return tokenize_here(model, request)


def tokenize_here(model: ServedModel, request: InferenceRequest, longest: int | None = None) -> Prompt:
    """Tokenize the prompt in this process.

    Args:
        longest: the number of tokens above which a prompt is refused; None for no such bound.

    Raises:
        ApiError: 400, it is no prompt for this model, or longer than `longest`.
    """
    if request.inputs:
        return _tokenize_inputs(model, request)
    if model.vector_sizes:
        raise invalid("model", f"The model {model.name!r} embeds: it is for /v1/embeddings alone.")
    prompt = request.prompt
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
        ids = [item for item in prompt if isinstance(item, int)]
        if longest is not None and len(ids) > longest:
            raise too_long(longest, f"your prompt has {len(ids)} tokens", request.prompt_param)
        _check_ids(model, ids, "prompt")
        return Prompt(ids)
    return _Encoding(model, request, longest).prompt()


def _tokenize_inputs(model: ServedModel, request: InferenceRequest) -> Prompt:
    if not model.vector_sizes:
        raise invalid("model", f"The model {model.name!r} does not embed.")
    wanted = request.asked.get("dimensions")
    if wanted is not None and wanted not in model.vector_sizes:
        sizes = " or ".join(map(str, model.vector_sizes))
        raise invalid("dimensions", f"Vectors of the model {model.name!r} have {sizes} dimensions, not {wanted}.")
    ids: list[int] = []
    lengths: list[int] = []
    for index, each in enumerate(request.inputs):
        if isinstance(each, str) and len(each) > max_characters(model):
            raise too_long(model.context_length, f"input {index} has {len(each)} characters", "input")
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


class _Encoding:
    """One text prompt or conversation on its way to tokens."""

    def __init__(self, model: ServedModel, request: InferenceRequest, longest: int | None) -> None:
        self._model = model
        self._request = request
        self._longest = longest
        self._param = request.prompt_param

    def prompt(self) -> Prompt:
        request = self._request
        if isinstance(request.prompt, str):
            return Prompt(self._ids(request.prompt, special=True))
        messages: list[dict[str, Any]] = request.prompt
        told = [tools.template_tool(tool) for tool in request.tools] if request.tool_choice != "none" else []
        try:
            ids = self._render(messages, told)
        except ChatTemplateError as exc:
            raise invalid("messages", str(exc)) from None
        found = (self._place(messages, told, ids, breakpoint) for breakpoint in request.breakpoints)
        return Prompt(ids, tuple(place for place in found if place is not None))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        """Return the text's tokens.

        Raises:
            ApiError: 400, they are more than the longest prompt's.
        """
        encode, longest = self._model.tokenizer.encode, self._longest
        if longest is not None:
            self._refuse_if_dense(text, longest)
        ids = encode(text, add_special_tokens=special)
        if longest is not None and len(ids) > longest:
            raise too_long(longest, f"your prompt has {len(ids)} tokens", self._param)
        return ids

    def _refuse_if_dense(self, text: str, longest: int) -> None:
        """Refuse a text of which a part is far too long, without the memory and the time that all of it takes.

        The parts have a few more tokens than the text, where they meet: `DENSE` is beyond what this can make.
        """
        if len(text) > (most := max_characters(self._model, longest)):
            raise too_long(longest, f"your prompt has {len(text)} characters, more than {most}", self._param)
        count = 0
        for start in range(0, len(text) - PIECE_CHARACTERS, PIECE_CHARACTERS):
            count += len(self._model.tokenizer.encode(text[start : start + PIECE_CHARACTERS], add_special_tokens=False))
            if count > DENSE * longest:
                found = f"the first {start + PIECE_CHARACTERS} characters of your prompt have {count} tokens"
                raise too_long(longest, found, self._param)

    def _render(self, messages: list[dict[str, Any]], told: list[dict[str, Any]], *, whole: bool = True) -> list[int]:
        tokenizer = self._model.tokenizer
        if not tokenizer.template_takes_tools:
            text = tokenizer.render_chat(tools.in_words(messages, told), None, whole)
        else:
            text = tokenizer.render_chat(messages, told or None, whole)
        return self._ids(text, special=False)

    def _place(
        self, messages: list[dict[str, Any]], told: list[dict[str, Any]], ids: list[int], at: Breakpoint
    ) -> CacheBreakpoint | None:
        """Return the breakpoint's position in tokens: the length of the common prefix with a prompt that differs
        there."""
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
            ending = self._render(*other, whole=False)
        except ChatTemplateError:
            return None  # a template that wants the whole conversation: then there is no such place
        same = next(
            (n for n, (a, b) in enumerate(zip(ids, ending, strict=False)) if a != b), min(len(ids), len(ending))
        )
        return CacheBreakpoint(same, at.seconds) if same else None
