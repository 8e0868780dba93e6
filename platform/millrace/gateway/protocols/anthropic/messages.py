"""POST /v1/messages and /v1/messages/count_tokens, in: Anthropic's body to the internal form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from inference_worker.contract.request import SamplingParams, StructuredSpec
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import Breakpoint, InferenceRequest, Tool
from millrace.gateway.protocols.anthropic.blocks import (
    AnthropicAssistant,
    AnthropicText,
    CacheControl,
    Conversation,
    Message,
)
from millrace.gateway.protocols.openai.parameters import MAX_TOKENS, check_ranges, read_body, within
from millrace.gateway.protocols.tools import check_tools

DIALECT = "anthropic.messages"
MAX_BREAKPOINTS = 4
MAX_USER_CHARACTERS = 512
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

# Values at which a documented parameter that is not supported does nothing. null is one for each.
NO_OP: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
}


class CustomTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class JsonFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: JsonFormat | None = None


class CountBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a prompt is made of."""

    model: str
    messages: list[Message]
    system: str | list[AnthropicText] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: int
    metadata: Metadata | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stream: bool | None = None
    # What "auto" may choose, a tier for those who paid for it ahead, is not there: both are the default.
    service_tier: Literal["auto", "standard_only"] | None = None


def read_messages(body: bytes) -> InferenceRequest:
    """Parse a body of /v1/messages.

    Raises:
        ApiError: 400 that names the parameter.
    """
    wanted = read_body(body, MessagesBody, NO_OP)
    within("max_tokens", wanted.max_tokens, 1, MAX_TOKENS)
    user = wanted.metadata.user_id if wanted.metadata else None
    if len(user or "") > MAX_USER_CHARACTERS:
        raise invalid("metadata.user_id", f"user_id takes at most {MAX_USER_CHARACTERS} characters.")
    return InferenceRequest(
        **_prompt(wanted),
        sampling=_sampling(wanted),
        max_tokens=wanted.max_tokens,
        user=user,
        stream=bool(wanted.stream),
    )


def read_count(body: bytes) -> InferenceRequest:
    """Parse a body of /v1/messages/count_tokens.

    Raises:
        ApiError: 400 that names the parameter.
    """
    return InferenceRequest(**_prompt(read_body(body, CountBody, NO_OP)), sampling=SamplingParams())


def _prompt(wanted: CountBody) -> dict[str, Any]:
    if not wanted.messages:
        raise invalid("messages", "messages must hold at least one message.")
    if isinstance(wanted.messages[-1], AnthropicAssistant):
        text = "The last message must be the user's: an answer cannot be begun for the model."
        raise invalid("messages", text, "unsupported_parameter")
    conversation = Conversation()
    if wanted.system:
        conversation.add("system", "system", wanted.system)
    for number, message in enumerate(wanted.messages):
        role = str(type(message).__struct_config__.tag)
        conversation.add(f"messages[{number}].content", role, message.content)
    tools = _tools(wanted.tools or ())
    choice, parallel = _choice(wanted.tool_choice, tools)
    form = wanted.output_config.format if wanted.output_config else None
    schema = None if form is None else msgspec.json.encode(form.schema).decode()
    return {
        "model": wanted.model,
        "prompt": conversation.messages,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tools": parallel,
        "structured": None if schema is None else StructuredSpec("json_schema", schema, "output_config.format.schema"),
        "breakpoints": _breakpoints(wanted, conversation),
        "parts": conversation.parts,
    }


def _tools(tools: Sequence[CustomTool]) -> tuple[Tool, ...]:
    for number, tool in enumerate(tools):
        if tool.input_schema.get("type") != "object":
            raise invalid(f"tools[{number}].input_schema.type", "A tool's input must be an object.")
    found = tuple(Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict)) for tool in tools)
    check_tools(found, "tools[{}].name", 128)
    return found


def _choice(choice: AnthropicToolChoice | None, tools: Sequence[Tool]) -> tuple[str, bool]:
    """Which to call, and whether several at once."""
    if choice is None:
        return "auto", True
    if not tools and choice.type != "none":
        raise invalid("tool_choice", "tool_choice is only allowed with tools.")
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid("tool_choice.name", "A tool is named with the type 'tool', and only then.")
    if choice.name is not None and choice.name not in {tool.name for tool in tools}:
        raise invalid("tool_choice.name", f"There is no tool {choice.name!r}.")
    return choice.name or _CHOICES[choice.type], not choice.disable_parallel_tool_use


def _sampling(wanted: MessagesBody) -> SamplingParams:
    within("temperature", wanted.temperature, 0, 1)
    given: dict[str, Any] = {"temperature": wanted.temperature, "top_k": wanted.top_k, "top_p": wanted.top_p}
    params = SamplingParams(
        stop=tuple(wanted.stop_sequences or ()),
        max_tokens=wanted.max_tokens,
        **{name: value for name, value in given.items() if value is not None},
    )
    check_ranges(params, stop="stop_sequences")
    return params


def _breakpoints(wanted: CountBody, conversation: Conversation) -> tuple[Breakpoint, ...]:
    """In the prompt's order: tools, system, messages."""
    found = [
        Breakpoint(tool.cache_control.seconds, tools=number)
        for number, tool in enumerate(wanted.tools or (), 1)
        if tool.cache_control is not None
    ]
    found += conversation.breakpoints
    if wanted.cache_control is not None:
        end = Breakpoint(wanted.cache_control.seconds, messages=len(conversation.messages))
        last = found[-1] if found else None
        length = len(conversation.messages[-1]["content"])
        if last is None or (last.messages, last.characters or length) != (end.messages, length):
            found.append(end)
        elif last.seconds != end.seconds:
            raise invalid("cache_control", "The last block has a cache_control with another ttl.")
    if len(found) > MAX_BREAKPOINTS:
        raise invalid("cache_control", f"At most {MAX_BREAKPOINTS} blocks may have cache_control, not {len(found)}.")
    if any(one.seconds < next_.seconds for one, next_ in pairwise(found)):
        raise invalid("cache_control.ttl", "A cache_control with ttl '1h' must not come after one with '5m'.")
    return tuple(found)
