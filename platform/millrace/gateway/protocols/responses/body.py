"""POST /v1/responses, in: OpenAI's body to the internal form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from inference_worker.contract.request import SamplingParams, StructuredSpec
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import InferenceRequest, Tool
from millrace.gateway.protocols.openai.parameters import (
    LABELS,
    MAX_TOKENS,
    TIERS,
    check_labels,
    check_ranges,
    read_body,
    within,
)
from millrace.gateway.protocols.responses.items import count_parts, template_messages
from millrace.gateway.protocols.tools import check_tools

DIALECT = "openai.responses"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# Values at which a documented parameter that is not supported does nothing. null is one for each.
NO_OP: Mapping[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning": ({}, {"effort": "none"}),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class NamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class FormatText(msgspec.Struct, forbid_unknown_fields=True, tag="text"):
    pass


class FormatObject(msgspec.Struct, forbid_unknown_fields=True, tag="json_object"):
    pass


class FormatSchema(msgspec.Struct, forbid_unknown_fields=True, tag="json_schema"):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: FormatText | FormatObject | FormatSchema | None = None
    verbosity: Literal["medium"] | None = None


class ResponseBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    stream: bool | None = None


def read_response(body: bytes) -> InferenceRequest:
    """Parse a body of /v1/responses.

    Raises:
        ApiError: 400 that names the parameter.
    """
    wanted = read_body(body, ResponseBody, NO_OP)
    within("max_output_tokens", wanted.max_output_tokens, 1, MAX_TOKENS)
    check_labels(wanted.metadata or {}, {name: getattr(wanted, name) for name in LABELS})
    tools = tuple(Tool(t.name, t.description, t.parameters or {}, bool(t.strict)) for t in wanted.tools or ())
    check_tools(tools, "tools[{}].name", 64)
    return InferenceRequest(
        model=wanted.model,
        prompt=template_messages(wanted.instructions, wanted.input),
        sampling=_sampling(wanted),
        max_tokens=wanted.max_output_tokens,
        tools=tools,
        tool_choice=_choice(wanted, tools),
        parallel_tools=wanted.parallel_tool_calls is not False,
        structured=_structured(wanted.text),
        service_class=TIERS[wanted.service_tier or "auto"],
        cache_key=wanted.prompt_cache_key,
        metadata=wanted.metadata or {},
        user=wanted.safety_identifier or wanted.user,
        stream=bool(wanted.stream),
        asked=_asked(wanted),
        parts=count_parts(wanted.input),
    )


def _sampling(wanted: ResponseBody) -> SamplingParams:
    given: dict[str, Any] = {"temperature": wanted.temperature, "top_p": wanted.top_p}
    params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    check_ranges(params)
    return params


def _choice(wanted: ResponseBody, tools: tuple[Tool, ...]) -> str:
    choice = wanted.tool_choice or "auto"
    if isinstance(choice, NamedChoice):
        if choice.name not in {tool.name for tool in tools}:
            raise invalid("tool_choice", f"There is no tool {choice.name!r}.")
        return choice.name
    if choice == "required" and not tools:
        raise invalid("tool_choice", "tool_choice is only allowed with tools.")
    return choice


def _structured(text: TextConfig | None) -> StructuredSpec | None:
    form = text.format if text else None
    if isinstance(form, FormatObject):
        return StructuredSpec("json_object", param="text.format")
    if isinstance(form, FormatSchema):
        if not _NAME.fullmatch(form.name):
            raise invalid("text.format.name", "It takes 1 to 64 letters, digits, _ and -.")
        described = {} if form.description is None else {"description": form.description}
        return StructuredSpec("json_schema", msgspec.json.encode(described | form.schema).decode(), "text.format")
    return None


def _asked(wanted: ResponseBody) -> dict[str, Any]:
    """Return what a response repeats of its request."""
    given: dict[str, Any] = msgspec.to_builtins(wanted)
    text = {"verbosity": "medium", **{k: v for k, v in (given["text"] or {}).items() if v is not None}}
    labels = {name: label for name in LABELS if (label := given[name]) is not None}
    return {
        "instructions": wanted.instructions,
        "max_output_tokens": wanted.max_output_tokens,
        "metadata": wanted.metadata or {},
        "parallel_tool_calls": wanted.parallel_tool_calls is not False,
        "temperature": 1.0 if wanted.temperature is None else wanted.temperature,
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": given["tool_choice"] or "auto",
        "tools": given["tools"] or [],
        "top_p": 1.0 if wanted.top_p is None else wanted.top_p,
        **labels,
    }
