"""Bodies of POST /v1/responses, read into the internal form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from inference_worker.contract.request import SamplingParams, StructuredSpec, Temperature, TopP, document
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import InferenceRequest, Tool
from millrace.gateway.protocols.documented import FunctionName, Label, LabelMap, Positive
from millrace.gateway.protocols.foreign_tools import remove_foreign_tools
from millrace.gateway.protocols.openai.parameters import (
    LABELS,
    MAX_TOKENS,
    TIERS,
    StreamOptions,
    check_labels,
    check_ranges,
    find_unset_sampling,
    name_obfuscation,
    read_request,
    within,
)
from millrace.gateway.protocols.reasoning import Effort, effort_options
from millrace.gateway.protocols.responses.items import ITEM_SCHEMA, count_parts, template_messages
from millrace.gateway.protocols.tools import MAX_TOOLS, allowed_names, check_tools, require_tool
from millrace.gateway.protocols.unknown_fields import IgnoredFields, StrictFields

DIALECT = "openai.responses"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# Documented parameters that are not supported, with the values at which they have no effect. null always has none.
NO_OP: Mapping[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "client_metadata": ({},),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# Parameters of `NO_OP` that are accepted with every value. They are named as ignored unless they have no effect.
HINTS = frozenset(
    {
        *("client_metadata", "context_management", "max_tool_calls", "prompt_cache_options", "prompt_cache_retention"),
        *("store", "truncation"),
    }
)
# Values of `include` that request a part of outputs that this endpoint never makes.
_WITHOUT_EFFECT = frozenset(
    {
        *("reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results"),
        *("file_search_call.results", "code_interpreter_call.outputs", "computer_call_output.output.image_url"),
        "message.input_image.image_url",
    }
)


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: FunctionName
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None


class NamedChoice(msgspec.Struct, forbid_unknown_fields=True, tag="function"):
    name: str


class AllowedChoice(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class FormatText(StrictFields, tag="text"):
    pass


class FormatObject(StrictFields, tag="json_object"):
    pass


class FormatSchema(StrictFields, tag="json_schema"):
    name: FunctionName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: FormatText | FormatObject | FormatSchema | None = None
    verbosity: Any = None  # a hint without effect


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the older name of summary


class ResponseBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: str | Annotated[list[dict[str, Any]], document(minItems=1, items=ITEM_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[FunctionTool], document(maxItems=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    metadata: LabelMap | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    speculation: Literal["auto", "off"] | None = None  # an extension, as in chat completions
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


def read_response(body: bytes) -> InferenceRequest:
    """Parse a body of /v1/responses.

    Raises:
        ApiError: 400 that names the parameter.
    """
    parsed, ignored = read_request(body, ResponseBody, NO_OP, HINTS, adapt=_adapt)
    _check_hints(parsed, ignored)
    within("max_output_tokens", parsed.max_output_tokens, 1, MAX_TOKENS)
    check_labels(parsed.metadata or {}, {name: getattr(parsed, name) for name in LABELS})
    tools = tuple(
        Tool(tool.name, tool.description, tool.parameters or {}, bool(tool.strict)) for tool in parsed.tools or ()
    )
    check_tools(tools, "tools[{}].name", 64)
    tools = ignored.enforce_tools(tools, "tools[].parameters")
    prompt = template_messages(parsed.instructions, parsed.input, ignored)
    choice, allowed = _choice(parsed, tools)
    structured = _read_structured(parsed.text, ignored)
    reasoning = effort_options(parsed.reasoning.effort if parsed.reasoning else None, "reasoning")
    for name in reasoning.names:
        ignored.add_known(name)
    sampling = _sampling(parsed)
    return InferenceRequest(
        analysis=ignored.make_analysis(
            parts=count_parts(parsed.input), unset_sampling=find_unset_sampling(sampling, parsed)
        ),
        model=parsed.model,
        prompt=prompt,
        sampling=sampling,
        max_tokens=parsed.max_output_tokens,
        reasoning=reasoning,
        tools=tools,
        tool_choice=choice,
        allowed_tools=allowed,
        parallel_tools=parsed.parallel_tool_calls is not False,
        structured=structured,
        service_class=TIERS[parsed.service_tier or "auto"],
        speculates=parsed.speculation != "off",
        cache_key=parsed.prompt_cache_key,
        metadata=parsed.metadata or {},
        user=parsed.safety_identifier or parsed.user,
        stream=bool(parsed.stream),
        continuous_usage=bool(parsed.stream_options and parsed.stream_options.continuous_usage_stats),
        echoed_parameters=_echoed_parameters(parsed),
    )


def _sampling(parsed: ResponseBody) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": parsed.temperature, "top_p": parsed.top_p}
    params = SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    check_ranges(params)
    return params


def _adapt(fields: dict[str, Any], ignored: IgnoredFields) -> None:
    remove_foreign_tools(fields, ("function",), ignored)


def _check_hints(parsed: ResponseBody, ignored: IgnoredFields) -> None:
    """Name the hints within supported parameters.

    Raises:
        ApiError: 400, `include` requests something that is not supported.
    """
    if parsed.text is not None and parsed.text.verbosity not in (None, "medium"):
        ignored.add_known("text.verbosity")
    name_obfuscation(parsed.stream_options, ignored)
    for value in parsed.include or ():
        if value not in _WITHOUT_EFFECT:
            raise invalid("include", f"Including {value[:100]!r} is not supported.", "unsupported_parameter")


def _choice(parsed: ResponseBody, tools: tuple[Tool, ...]) -> tuple[str, tuple[str, ...] | None]:
    """Return the tool choice, and the names of the tools that may be called if they are not all."""
    choice, allowed = parsed.tool_choice or "auto", None
    if isinstance(choice, NamedChoice):
        require_tool(choice.name, tools)
        return choice.name, None
    if isinstance(choice, AllowedChoice):
        names = [tool.get("name") for tool in choice.tools if tool.get("type") == "function"]
        if choice.mode == "auto" and choice.tools and not names:  # only tools that are not offered
            return "none", None
        choice, allowed = choice.mode, allowed_names(names, tools)
    if choice == "required" and not tools:
        raise invalid("tool_choice", "tool_choice is only allowed with tools.")
    return choice, allowed


def _read_structured(text: TextConfig | None, ignored: IgnoredFields) -> StructuredSpec | None:
    text_format = text.format if text else None
    if isinstance(text_format, FormatObject):
        return StructuredSpec("json_object", param="text.format")
    if isinstance(text_format, FormatSchema):
        if not _NAME.fullmatch(text_format.name):
            raise invalid("text.format.name", "The name must have 1 to 64 letters, digits, _ or -.")
        schema = ignored.enforce(text_format.schema, "text.format.schema", strict=text_format.strict)
        described = {} if text_format.description is None else {"description": text_format.description}
        return StructuredSpec("json_schema", msgspec.json.encode(described | schema).decode(), "text.format")
    return None


def _echoed_tool(tool: dict[str, Any]) -> dict[str, Any]:
    nullable = ("description", "parameters", "strict")
    return {name: value for name, value in tool.items() if value is not None or name in nullable}


def _echoed_parameters(parsed: ResponseBody) -> dict[str, Any]:
    """Return the request's parameters that its response repeats."""
    given: dict[str, Any] = msgspec.to_builtins(parsed.text) or {}
    text = {"verbosity": "medium", **{name: value for name, value in given.items() if value is not None}}
    labels = {name: label for name in LABELS if (label := getattr(parsed, name)) is not None}
    return {
        "instructions": parsed.instructions,
        "max_output_tokens": parsed.max_output_tokens,
        "metadata": parsed.metadata or {},
        "parallel_tool_calls": parsed.parallel_tool_calls is not False,
        "reasoning": {"effort": parsed.reasoning.effort if parsed.reasoning else None, "summary": None},
        "temperature": 1.0 if parsed.temperature is None else parsed.temperature,
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": msgspec.to_builtins(parsed.tool_choice) or "auto",
        "tools": [_echoed_tool(msgspec.to_builtins(tool)) for tool in parsed.tools or ()],
        "top_p": 1.0 if parsed.top_p is None else parsed.top_p,
        **labels,
    }
