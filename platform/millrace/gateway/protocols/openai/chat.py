"""Bodies of POST /v1/chat/completions, read into the internal form."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from inference_worker.contract.request import MAX_LOGPROBS, Logprobs, StructuredSpec, document
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import Breakpoint, InferenceRequest, ReasoningOptions, TemplateOptions, Tool
from millrace.gateway.protocols.documented import FunctionName, NotNegative, Positive
from millrace.gateway.protocols.foreign_tools import adapt_chat
from millrace.gateway.protocols.openai.functions import convert_functions
from millrace.gateway.protocols.openai.guided import read_guided
from millrace.gateway.protocols.openai.messages import (
    CACHE_SECONDS,
    MAX_BREAKPOINTS,
    ChatAssistant,
    Message,
    TextPart,
    count_parts,
    explicit_breakpoints,
    template_messages,
)
from millrace.gateway.protocols.openai.parameters import (
    Common,
    common_fields,
    find_unset_sampling,
    read_request,
    sampling_params,
    within,
)
from millrace.gateway.protocols.reasoning import Effort, check_budget, effort_options
from millrace.gateway.protocols.tools import MAX_TOOLS, allowed_names, check_tools, require_tool
from millrace.gateway.protocols.unknown_fields import IgnoredFields, StrictFields

DIALECT = "openai.chat"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatFunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ChatNamedChoice(msgspec.Struct, forbid_unknown_fields=True, tag="function"):
    function: Named


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[ChatFunctionTool]


class ChatAllowedChoice(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools"):
    allowed_tools: AllowedTools


class ChatJsonSchema(StrictFields):
    name: FunctionName
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ChatFormatText(StrictFields, tag="text"):
    pass


class ChatFormatObject(StrictFields, tag="json_object"):
    pass


class ChatFormatSchema(StrictFields, tag="json_schema"):
    json_schema: ChatJsonSchema


class CacheOptions(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class ChatPrediction(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["content"]
    content: str | list[TextPart]


class ChatBody(Common):
    messages: Annotated[list[Message], document(minItems=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[ChatFunctionTool], document(maxItems=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChatNamedChoice | ChatAllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ChatFormatText | ChatFormatObject | ChatFormatSchema | None = None
    prompt_cache_options: CacheOptions | None = None
    functions: list[dict[str, Any]] | None = None  # the older name of tools
    function_call: Any = None  # the older name of tool_choice
    reasoning_effort: Effort | None = None
    prediction: ChatPrediction | None = None
    # vLLM's names.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    thinking_token_budget: NotNegative | None = None
    continue_final_message: bool | None = None


def read_chat(body: bytes) -> InferenceRequest:
    """Parse the body of a chat completion request.

    Raises:
        ApiError: 400 that names the parameter.
    """
    chat, ignored = read_request(body, ChatBody, prepare=convert_functions, adapt=adapt_chat)
    fields = common_fields(chat, ignored)
    if not chat.messages:
        raise invalid("messages", "messages must have at least one message.")
    tools = ignored.enforce_tools(function_tools(chat.tools), "tools[].function.parameters")
    choice, allowed = _tool_choice(chat, tools)
    structured = _read_structured(chat, ignored)
    reasoning = _reasoning(chat)
    for name in reasoning.names:
        ignored.add_known(name)
    sampling = sampling_params(chat, logprobs=_logprobs(chat))
    return InferenceRequest(
        **fields,
        analysis=ignored.make_analysis(
            parts=count_parts(chat.messages), unset_sampling=find_unset_sampling(sampling, chat)
        ),
        prompt=template_messages(chat.messages),
        template=_template(chat),
        sampling=sampling,
        max_tokens=_max_tokens(chat),
        reasoning=reasoning,
        tools=tools,
        tool_choice=choice,
        allowed_tools=allowed,
        parallel_tools=chat.parallel_tool_calls is not False,
        structured=structured,
        breakpoints=_breakpoints(chat),
        prediction=_prediction(chat.prediction),
        echoed_parameters=_echoed_parameters(chat),
    )


def _prediction(prediction: ChatPrediction | None) -> str:
    """Return the text of the expected output."""
    if prediction is None:
        return ""
    content = prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _echoed_parameters(chat: ChatBody) -> dict[str, Any]:
    """Return the parameters that determine the form of the response."""
    functions = {"functions": True} if chat.functions else {}
    return functions if chat.prompt_logprobs is None else {**functions, "prompt_logprobs": True}


def _max_tokens(chat: ChatBody) -> int | None:
    max_tokens = chat.max_completion_tokens
    within("max_completion_tokens", max_tokens, 1, 2**31)
    if None not in (max_tokens, chat.max_tokens) and max_tokens != chat.max_tokens:
        raise invalid("max_tokens", "max_tokens is an older name of max_completion_tokens. Set only one of them.")
    return max_tokens or chat.max_tokens


def _logprobs(chat: ChatBody) -> int | None:
    within("top_logprobs", chat.top_logprobs, 0, MAX_LOGPROBS)
    if chat.top_logprobs and not chat.logprobs:
        raise invalid("top_logprobs", "top_logprobs are only allowed when logprobs is true.")
    return chat.top_logprobs or 0 if chat.logprobs else None


def _template(chat: ChatBody) -> TemplateOptions:
    continues = bool(chat.continue_final_message)
    last = chat.messages[-1]
    if continues and (not isinstance(last, ChatAssistant) or last.tool_calls):
        message = "Only a last message with the role assistant and without tool calls can be continued."
        raise invalid("continue_final_message", message)
    if continues and chat.add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt cannot be combined.")
    return TemplateOptions(
        continues=continues,
        adds_prompt=chat.add_generation_prompt is not False,
        variables=chat.chat_template_kwargs or {},
        special_tokens=chat.add_special_tokens,
        max_tokens=chat.truncate_prompt_tokens,
    )


def _reasoning(chat: ChatBody) -> ReasoningOptions:
    """Return the reasoning that the request asks for. An explicit budget replaces the effort's."""
    options, budget = effort_options(chat.reasoning_effort, "reasoning_effort"), chat.thinking_token_budget
    if budget is None:
        return options
    check_budget(budget, _max_tokens(chat), "thinking_token_budget")
    return dataclasses.replace(options, budget=budget, names=(*options.names, "thinking_token_budget"))


def function_tools(tools: Sequence[ChatFunctionTool] | None) -> tuple[Tool, ...]:
    """Return the tools after checking them.

    Raises:
        ApiError: 400 that names the parameter.
    """
    functions = [tool.function for tool in tools or ()]
    found = tuple(Tool(each.name, each.description, each.parameters or {}, bool(each.strict)) for each in functions)
    check_tools(found, "tools[{}].function.name", 64)
    return found


def _tool_choice(chat: ChatBody, tools: tuple[Tool, ...]) -> tuple[str, tuple[str, ...] | None]:
    """Return the tool choice, and the names of the tools that may be called if they are not all."""
    choice, allowed = chat.tool_choice or "auto", None
    if isinstance(choice, ChatNamedChoice):
        return require_tool(choice.function.name, tools), None
    if isinstance(choice, ChatAllowedChoice):
        names = (tool.function.name for tool in choice.allowed_tools.tools)
        choice, allowed = choice.allowed_tools.mode, allowed_names(names, tools)
    if choice == "required" and not tools:
        raise invalid("tool_choice", "tool_choice is only allowed with tools.")
    return choice, allowed


def _read_structured(chat: ChatBody, ignored: IgnoredFields) -> StructuredSpec | None:
    spec = read_guided(chat, ignored)
    response_format = chat.response_format
    if spec is not None and response_format is not None and not isinstance(response_format, ChatFormatText):
        raise invalid(spec.param, f"{spec.param} and response_format cannot be combined.")
    if spec is not None and chat.tools and chat.tool_choice != "none":
        raise ApiError("unsupported_parameter", f"{spec.param} and tools cannot be combined.", spec.param)
    if isinstance(response_format, ChatFormatObject):
        return StructuredSpec("json_object")
    if isinstance(response_format, ChatFormatSchema):
        schema = response_format.json_schema
        if not _NAME.fullmatch(schema.name):
            raise invalid("response_format.json_schema.name", "The name must have 1 to 64 letters, digits, _ or -.")
        described = {} if schema.description is None else {"description": schema.description}
        path = "response_format.json_schema.schema"
        enforceable = ignored.enforce(schema.schema or {}, path, strict=schema.strict)
        return StructuredSpec("json_schema", msgspec.json.encode(described | enforceable).decode())
    return spec


def _breakpoints(chat: ChatBody) -> tuple[Breakpoint, ...]:
    """Return the last explicit breakpoints, and one at the end of the prompt if implicit caching is requested."""
    breakpoints = explicit_breakpoints(chat.messages)
    options = chat.prompt_cache_options
    if options is not None and options.mode != "explicit":
        breakpoints = [*breakpoints[1 - MAX_BREAKPOINTS :], Breakpoint(CACHE_SECONDS, messages=len(chat.messages))]
    return tuple(breakpoints[-MAX_BREAKPOINTS:])
