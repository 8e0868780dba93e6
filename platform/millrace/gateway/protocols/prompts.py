"""Tokenization of prompts, and the positions of cache breakpoints in tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from inference_worker.checkpoints.chat_template import ChatTemplateError, ChatTemplateWorkError
from inference_worker.checkpoints.encoder_config import ModelTask
from inference_worker.checkpoints.template_probe import TemplateTraits, adapt_messages
from inference_worker.checkpoints.template_work import WorkBudget
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.output_formats import HERMES
from inference_worker.contract.request import CacheBreakpoint, ReasoningSpec
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import MODEL_LENGTH, Breakpoint, InferenceRequest, Prompt, TokenizedPrompts
from millrace.gateway.protocols import tools
from millrace.gateway.protocols.encoder_inputs import check_ids, tokenize_inputs, tokenize_pairs
from millrace.gateway.protocols.prompt_bounds import max_characters, message_count, too_long
from millrace.gateway.protocols.upstreams.images import require_images
from millrace.gateway.protocols.upstreams.requests import upstream_prompt

LOOP_UNITS = 30_000  # work of a chat template on the event loop: 3 to 10 ms
SHORT_CHARACTERS = 2048
SHORT_MESSAGES = 8
PIECE_CHARACTERS = 2**16
# Why a model rejects a request of another task.
_TASKS: Mapping[ModelTask, str] = {
    "generate": "generates text. Use /v1/chat/completions",
    "embed": "is an embedding model. Use /v1/embeddings",
    "rerank": "is a cross-encoder. Use /v1/rerank or /v1/score",
}
_loop_budget: ContextVar[WorkBudget | None] = ContextVar("_loop_budget", default=None)  # set on the event loop
DENSITY_LIMIT = 2  # a prompt is rejected if its first pieces have this multiple of the maximum tokens


def is_short(request: InferenceRequest) -> bool:
    """Return whether the prompt is tokenized in a fraction of a millisecond."""
    prompt = request.prompt
    if request.analysis.tokenized is not None or request.encoder.inputs or request.tools or request.breakpoints:
        return False
    if len(request.prediction) > SHORT_CHARACTERS:
        return False
    if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], dict):
        return len(prompt) <= SHORT_CHARACTERS
    if len(prompt) > SHORT_MESSAGES or any("tool_calls" in message for message in prompt):
        return False
    return sum(len(message["content"] or "") for message in prompt) <= SHORT_CHARACTERS


async def tokenize(model: ServedModel, request: InferenceRequest) -> Prompt:
    """Tokenize the prompt, in this process if it is small, or else in a prompt process.

    Raises:
        ApiError: 400, the prompt is invalid for this model.
    """
    return await make_prompt(
        model,
        request,
        lambda: tokenize_here(model, request),
        lambda prompts: prompts.prompt(model, request.analysis.number),
    )


async def make_prompt(
    model: ServedModel,
    request: InferenceRequest,
    here: Callable[[], Prompt],
    in_process: Callable[[TokenizedPrompts], Awaitable[Prompt]],
) -> Prompt:
    """Make a prompt of the request with `here`, in this process, or else with `in_process`, in a prompt process.

    This process renders only chat templates that were measured to be cheap, and stops if one needs more work.

    Raises:
        ApiError: as `here` and `in_process` do.
    """
    if request.analysis.tokenized is not None:
        return await in_process(request.analysis.tokenized)
    if request.analysis.in_process is not None and not may_render_here(model, request):
        return await in_process(request.analysis.in_process)
    token = _loop_budget.set(WorkBudget(LOOP_UNITS))
    try:
        return here()
    except ChatTemplateWorkError as exc:
        if request.analysis.in_process is None:
            raise invalid(request.prompt_param, str(exc)) from None
    finally:
        _loop_budget.reset(token)
    return await in_process(request.analysis.in_process)


def may_render_here(model: ServedModel, request: InferenceRequest) -> bool:
    """Return whether the event loop may make the prompt: it renders no chat template, or one that is cheap."""
    renders = message_count(request) > 0 or (bool(request.encoder.queries) and model.pair_template is not None)
    if not renders or model.upstream is not None or not model.tokenizer.has_chat_template:
        return True
    return model.tokenizer.is_template_cheap is True


def tokenize_here(model: ServedModel, request: InferenceRequest, max_tokens: int | None = None) -> Prompt:
    """Tokenize the prompt in this process.

    Args:
        max_tokens: the maximum number of tokens of a prompt; None for no limit.

    Raises:
        ApiError: 400, the prompt is invalid for this model, or longer than `max_tokens`.
    """
    task: ModelTask = "rerank" if request.encoder.queries else "embed" if request.encoder.inputs else "generate"
    if model.task != task:
        raise invalid("model", f"The model {model.name!r} {_TASKS[model.task]}.")
    if model.upstream is not None:
        return upstream_prompt(model, request)
    for name, message in request.analysis.foreign_limits:
        raise ApiError("unsupported_parameter", message, name)
    require_images(request, is_supported=False)
    if request.encoder.queries:
        return tokenize_pairs(model, request, _loop_budget.get())
    if request.encoder.inputs:
        return tokenize_inputs(model, request)
    prompt = request.prompt
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
        ids = [item for item in prompt if isinstance(item, int)]
        if max_tokens is not None and request.template.max_tokens is None and len(ids) > max_tokens:
            raise too_long(max_tokens, f"your prompt has {len(ids)} tokens", request.prompt_param)
        check_ids(model, ids, "prompt")
        return Prompt(_cut_front(model, request, ids))
    encoded = _Encoding(model, request, max_tokens).prompt()
    if request.prediction and request.speculates:
        return dataclasses.replace(encoded, prediction=_prediction(model, request.prediction))
    return encoded


def _cut_front(model: ServedModel, request: InferenceRequest, ids: list[int]) -> list[int]:
    """Return the part of the prompt that the request uses."""
    max_tokens = request.template.max_tokens
    if max_tokens is None:
        return ids
    if max_tokens == MODEL_LENGTH:
        max_tokens = max(1, model.context_length - (request.max_tokens or 1))
    return ids[-max_tokens:]


def _prediction(model: ServedModel, text: str) -> tuple[int, ...]:
    """Return the tokens of a predicted output. What is longer than any output is left out."""
    ids = model.tokenizer.encode(text[: max_characters(model)], add_special_tokens=False)
    return tuple(token for token in ids[: model.context_length] if token < model.vocab_size)


def _raise_on_loop(error: ChatTemplateError) -> None:
    """Raise the error if the event loop's budget is exceeded, since a prompt process may have a larger one."""
    if isinstance(error, ChatTemplateWorkError) and _loop_budget.get() is not None:
        raise error


def _find_traits(tokenizer: Tokenizer) -> TemplateTraits:
    """Return the traits of the chat template. The event loop does not probe it."""
    if tokenizer.template_traits is None and _loop_budget.get() is not None:
        return TemplateTraits()
    return tokenizer.probe_template()


class _Encoding:
    """The tokenization of one text prompt or conversation."""

    def __init__(self, model: ServedModel, request: InferenceRequest, max_tokens: int | None) -> None:
        self._model = model
        self._request = request
        self._max_tokens = max_tokens if request.template.max_tokens is None else None
        self._param = request.prompt_param
        self._reasoning: ReasoningSpec | None = None  # set when the whole prompt is rendered

    def prompt(self) -> Prompt:
        request = self._request
        if isinstance(request.prompt, str):
            ids = self._ids(request.prompt, special=request.template.special_tokens is not False)
            return Prompt(_cut_front(self._model, request, ids))
        messages: list[dict[str, Any]] = request.prompt
        template_tools = [tools.template_tool(tool) for tool in request.tools] if request.tool_choice != "none" else []
        if template_tools and request.tool_choice != "auto" and self._model.tokenizer.tool_format is None:
            message = "This model's tool calls are not parsed, so they cannot be required. Set tool_choice to 'auto'."
            raise invalid("tool_choice", message, "unsupported_parameter")
        try:
            ids = self._render(messages, template_tools)
        except ChatTemplateError as exc:
            _raise_on_loop(exc)
            raise invalid("messages", str(exc)) from None
        if request.template.max_tokens is not None:
            # Without its beginning, the prompt has no cached prefix.
            return Prompt(_cut_front(self._model, request, ids), reasoning=self._reasoning)
        positions = (self._position(messages, template_tools, ids, breakpoint) for breakpoint in request.breakpoints)
        found = tuple(position for position in positions if position is not None)
        return Prompt(ids, found, reasoning=self._reasoning)

    def _ids(self, text: str, *, special: bool, separator: str = "") -> list[int]:
        """Return the text's tokens, without those of the separator.

        Raises:
            ApiError: 400, there are more than the maximum number of tokens.
        """
        encode, max_tokens = self._model.tokenizer.encode, self._max_tokens
        if max_tokens is not None:
            self._reject_if_dense(text, max_tokens, separator)
        ids = encode(text, add_special_tokens=special, separator=separator)
        if max_tokens is not None and len(ids) > max_tokens:
            raise too_long(max_tokens, f"your prompt has {len(ids)} tokens", self._param)
        return ids

    def _reject_if_dense(self, text: str, max_tokens: int, separator: str = "") -> None:
        """Reject a text with a part that has far too many tokens, without tokenizing the whole text.

        Splitting a text adds a few tokens where its pieces meet. `DENSITY_LIMIT` is higher than this can add.
        """
        if len(text) > (max_chars := max_characters(self._model, max_tokens)):
            raise too_long(max_tokens, f"your prompt has {len(text)} characters, more than {max_chars}", self._param)
        encode = self._model.tokenizer.encode
        separator_tokens = len(encode(separator, add_special_tokens=False)) if separator else 0
        count = 0
        for start in range(0, len(text) - PIECE_CHARACTERS, PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            count += len(encode(piece, add_special_tokens=False))
            if separator:
                count -= separator_tokens * piece.count(separator)
            if count > DENSITY_LIMIT * max_tokens:
                excess = f"the first {start + PIECE_CHARACTERS} characters of your prompt have {count} tokens"
                raise too_long(max_tokens, excess, self._param)

    def _render(
        self, messages: list[dict[str, Any]], template_tools: list[dict[str, Any]], *, whole: bool = True
    ) -> list[int]:
        tokenizer, options = self._model.tokenizer, self._request.template
        variables, prefill = self._variables(), ""
        separated = None
        if self._model.separates_contents:
            separated = tokenizer.separate_contents(messages, template_tools, variables)
        if separated is not None:
            messages, template_tools, variables = separated.messages, separated.tools, separated.variables
        if whole and options.continues:
            *messages, last = messages
            prefill = last["content"]
        traits = _find_traits(tokenizer)
        template_messages = messages
        if not tokenizer.template_takes_tools:
            form = tokenizer.tool_format or HERMES
            template_messages = tools.render_tools_as_text(
                messages, template_tools, form, keeps_calls=traits.renders_calls
            )
            template_tools = []
        template_messages = adapt_messages(template_messages, traits)
        adds_prompt = whole and (options.adds_prompt or options.continues)
        text = tokenizer.render_chat(
            template_messages, template_tools or None, adds_prompt, variables, _loop_budget.get()
        )
        if separated is not None:
            text = separated.restore(text)
        if adds_prompt:
            self._reasoning = self._find_reasoning(text, prefill)
        separator = "" if separated is None else separated.separator
        return self._ids(text + prefill, special=bool(options.special_tokens), separator=separator)

    def _variables(self) -> Mapping[str, Any]:
        """Return the further variables of the template. Families have different names for the reasoning's switch."""
        variables, is_enabled = self._request.template.variables, self._request.reasoning.is_enabled
        if is_enabled is None or self._model.tokenizer.reasoning_format is None:
            return variables
        return {"enable_thinking": is_enabled, "thinking": is_enabled, **variables}

    def _find_reasoning(self, text: str, prefill: str) -> ReasoningSpec | None:
        """Return the reasoning that may precede the answer to a rendered prompt; None: the answer follows."""
        form, options = self._model.tokenizer.reasoning_format, self._request.reasoning
        if form is None:
            return None
        if prefill.strip():
            started = max(prefill.rfind(mark.rstrip()) for mark in form.starts)
            is_open = started > max(prefill.rfind(mark.rstrip()) for mark in form.ends)
            has_ended = not is_open
        else:
            end = text.rstrip()
            is_open = end.endswith(tuple(mark.rstrip() for mark in form.starts))
            has_ended = end.endswith(tuple(mark.rstrip() for mark in form.ends))
        if has_ended:
            return None
        variables = self._request.template.variables
        is_requested = options.is_enabled or variables.get("enable_thinking") or variables.get("thinking")
        return ReasoningSpec(form.name, is_open, bool(is_requested), options.budget)

    def _position(
        self,
        messages: list[dict[str, Any]],
        template_tools: list[dict[str, Any]],
        ids: list[int],
        breakpoint_: Breakpoint,
    ) -> CacheBreakpoint | None:
        """Return the breakpoint's position in tokens, or None if it has none.

        The position is the length of the common prefix of the prompt and a prompt that differs at the breakpoint.
        """
        if breakpoint_.tools is not None and breakpoint_.tools < len(template_tools):
            changed = messages, template_tools[: breakpoint_.tools]
        elif breakpoint_.tools is not None or not breakpoint_.messages:
            changed = [{**message, "content": "\0"} for message in messages], template_tools
        else:
            prefix = messages[: breakpoint_.messages]
            if breakpoint_.characters is not None:
                prefix[-1] = {**prefix[-1], "content": prefix[-1]["content"][: breakpoint_.characters]}
            changed = prefix, template_tools
        try:
            changed_ids = self._render(*changed, whole=False)
        except ChatTemplateError as exc:
            _raise_on_loop(exc)
            return None  # the template requires the whole conversation, so there is no position
        common_length = next(
            (index for index, (first, second) in enumerate(zip(ids, changed_ids, strict=False)) if first != second),
            min(len(ids), len(changed_ids)),
        )
        return CacheBreakpoint(common_length, breakpoint_.seconds) if common_length else None
