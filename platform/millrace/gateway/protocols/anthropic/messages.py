"""Bodies of POST /v1/messages and /v1/messages/count_tokens, read into the internal form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from inference_worker.contract.request import SamplingParams, StructuredSpec, TopP, document
from inference_worker.contract.validation import MAX_STOP_CHARACTERS, MAX_STOPS
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import Breakpoint, InferenceRequest, ReasoningOptions, TemplateOptions, Tool
from millrace.gateway.protocols.anthropic.blocks import (
    AnthropicAssistant,
    AnthropicText,
    CacheControl,
    Conversation,
    Message,
)
from millrace.gateway.protocols.documented import MAX_LABEL_CHARACTERS, Label, NotNegative, ObjectSchema, Positive
from millrace.gateway.protocols.foreign_tools import adapt_messages
from millrace.gateway.protocols.openai.parameters import (
    MAX_TOKENS,
    check_ranges,
    find_unset_sampling,
    read_request,
    within,
)
from millrace.gateway.protocols.reasoning import BUDGETS, Effort, check_budget
from millrace.gateway.protocols.tools import MAX_TOOLS, check_tools
from millrace.gateway.protocols.unknown_fields import IgnoredFields, StrictFields

DIALECT = "anthropic.messages"
MAX_BREAKPOINTS = 4
MAX_NAME_CHARACTERS = 128
StopSequence = Annotated[str, document(minLength=1, maxLength=MAX_STOP_CHARACTERS)]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

# Documented parameters that are not supported, with the values at which they have no effect. null always has none.
NO_OP: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({}, {"edits": []}),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
# Parameters of `NO_OP` that are accepted with every value. They are named as ignored unless they have no effect.
HINTS = frozenset({"container", "context_management", "diagnostics", "mcp_servers", "speed"})


class CustomTool(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, document(pattern=f"^[A-Za-z0-9_-]{{1,{MAX_NAME_CHARACTERS}}}$")]
    input_schema: ObjectSchema
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # input is always streamed as it is generated
    input_examples: list[dict[str, Any]] | None = None


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicMetadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: Label | None = None


class JsonFormat(StrictFields):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class UsageOptions(msgspec.Struct, forbid_unknown_fields=True):
    continuous_usage_stats: bool | None = None
    include_usage: bool | None = None  # the last event always has it


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: JsonFormat | None = None
    effort: Effort | None = None


class ThinkingEnabled(msgspec.Struct, forbid_unknown_fields=True, tag="enabled"):
    budget_tokens: Positive
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(msgspec.Struct, forbid_unknown_fields=True, tag="adaptive"):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(msgspec.Struct, forbid_unknown_fields=True, tag="disabled"):
    pass


class Thread(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class CountBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The part of a body that describes the prompt."""

    model: str
    messages: Annotated[list[Message], document(minItems=1)]
    system: str | list[AnthropicText] | None = None
    tools: Annotated[list[CustomTool], document(maxItems=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older name of output_config.format
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    thread: Thread | None = None  # nothing is stored, so a thread can be created and not continued


class MessagesBody(CountBody, kw_only=True):
    max_tokens: Positive
    metadata: AnthropicMetadata | None = None
    stop_sequences: Annotated[list[StopSequence], document(maxItems=MAX_STOPS)] | None = None
    temperature: Annotated[float, document(minimum=0, maximum=1)] | None = None
    top_k: NotNegative | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    # "auto" would allow prepaid priority capacity, which does not exist here. Both values mean the default tier.
    service_tier: Literal["auto", "standard_only"] | None = None
    stream_options: UsageOptions | None = None  # an extension, as in chat completions; the next one too
    speculation: Literal["auto", "off"] | None = None


B = TypeVar("B", bound=CountBody)


def read_messages(body: bytes) -> InferenceRequest:
    """Parse a body of /v1/messages.

    Raises:
        ApiError: 400 that names the parameter, or 404 for a thread that the request continues.
    """
    parsed, ignored = _read(body, MessagesBody)
    within("max_tokens", parsed.max_tokens, 1, MAX_TOKENS)
    user = parsed.metadata.user_id if parsed.metadata else None
    if len(user or "") > MAX_LABEL_CHARACTERS:
        raise invalid("metadata.user_id", f"user_id may have at most {MAX_LABEL_CHARACTERS} characters.")
    thinking = parsed.thinking
    display = None if thinking is None or isinstance(thinking, ThinkingDisabled) else thinking.display
    sampling = _sampling(parsed)
    return InferenceRequest(
        **_read_prompt(parsed, ignored, find_unset_sampling(sampling, parsed)),
        sampling=sampling,
        max_tokens=parsed.max_tokens,
        user=user,
        speculates=parsed.speculation != "off",
        stream=bool(parsed.stream),
        continuous_usage=bool(parsed.stream_options and parsed.stream_options.continuous_usage_stats),
        echoed_parameters={"thinking_display": display} if display else {},
    )


def read_count(body: bytes) -> InferenceRequest:
    """Parse a body of /v1/messages/count_tokens.

    Raises:
        ApiError: 400 that names the parameter, or 404 for a thread that the request continues.
    """
    parsed, ignored = _read(body, CountBody)
    return InferenceRequest(**_read_prompt(parsed, ignored), sampling=SamplingParams())


def _read(body: bytes, type_: type[B]) -> tuple[B, IgnoredFields]:
    parsed, ignored = read_request(body, type_, NO_OP, HINTS, adapt=adapt_messages)
    if isinstance(parsed.thinking, ThinkingEnabled):
        max_tokens = parsed.max_tokens if isinstance(parsed, MessagesBody) else None
        check_budget(parsed.thinking.budget_tokens, max_tokens, "thinking.budget_tokens", minimum=1)
    for name in _reasoning(parsed).names:
        ignored.add_known(name)
    if parsed.thread is not None:
        if parsed.thread.type == "continue":  # the SDK then sends all messages
            message = "Threads are not stored. Send all messages, without thread or with thread.type 'create'."
            raise ApiError("thread_not_found", message, "thread")
        ignored.add_known("thread")
    return parsed, ignored


def _reasoning(parsed: CountBody) -> ReasoningOptions:
    """Return the reasoning that the request asks for. Without `thinking`, templates with a switch omit it."""
    effort, thinking = parsed.output_config.effort if parsed.output_config else None, parsed.thinking
    names = () if effort is None else ("output_config.effort",)
    if isinstance(thinking, ThinkingEnabled):
        return ReasoningOptions(is_enabled=True, budget=thinking.budget_tokens, names=(*names, "thinking"))
    if isinstance(thinking, ThinkingAdaptive):
        return ReasoningOptions(is_enabled=True, budget=BUDGETS.get(effort or ""), names=(*names, "thinking"))
    return ReasoningOptions(is_enabled=False, budget=0 if thinking is not None else None, names=names)


def _read_prompt(parsed: CountBody, ignored: IgnoredFields, unset_sampling: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the prompt, the parameters that belong to it, and the analysis, by their names in `InferenceRequest`.

    Raises:
        ApiError: 400 that names the parameter.
    """
    if not parsed.messages:
        raise invalid("messages", "messages must have at least one message.")
    conversation = Conversation()
    if parsed.system:
        conversation.add("system", "system", parsed.system)
    for number, message in enumerate(parsed.messages):
        role = str(type(message).__struct_config__.tag)
        conversation.add(f"messages[{number}].content", role, message.content)
    is_prefill = isinstance(parsed.messages[-1], AnthropicAssistant)
    if is_prefill and "tool_calls" in conversation.messages[-1]:
        raise invalid("messages", "The last message must not have tool_use blocks. Add their results.")
    tools = ignored.enforce_tools(_tools(parsed.tools or ()), "tools[].input_schema")
    choice, parallel = _choice(parsed.tool_choice, tools)
    output_format, param = _output_format(parsed)
    schema = None if output_format is None else msgspec.json.encode(output_format.schema).decode()
    return {
        "model": parsed.model,
        "prompt": conversation.messages,
        "template": TemplateOptions(continues=is_prefill),
        "reasoning": _reasoning(parsed),
        "tools": tools,
        "tool_choice": choice,
        "parallel_tools": parallel,
        "structured": None if schema is None else StructuredSpec("json_schema", schema, f"{param}.schema"),
        "breakpoints": _breakpoints(parsed, conversation),
        "analysis": ignored.make_analysis(parts=conversation.parts, unset_sampling=unset_sampling),
    }


def _output_format(parsed: CountBody) -> tuple[JsonFormat | None, str]:
    """Return the format of the answer and the name of its parameter.

    Raises:
        ApiError: 400, both names are set.
    """
    output_format = parsed.output_config.format if parsed.output_config else None
    if parsed.output_format is None:
        return output_format, "output_config.format"
    if output_format is not None and output_format != parsed.output_format:
        message = "output_format is an older name of output_config.format. Set only one of them."
        raise invalid("output_format", message)
    return parsed.output_format, "output_format"


def _tools(tools: Sequence[CustomTool]) -> tuple[Tool, ...]:
    for number, tool in enumerate(tools):
        if tool.input_schema.get("type") != "object":
            raise invalid(f"tools[{number}].input_schema.type", "A tool's input must be an object.")
    result = tuple(Tool(tool.name, _description(tool), tool.input_schema, bool(tool.strict)) for tool in tools)
    check_tools(result, "tools[{}].name", MAX_NAME_CHARACTERS)
    return result


def _description(tool: CustomTool) -> str | None:
    """Return the tool's description with its input examples, for which templates have no field."""
    if not tool.input_examples:
        return tool.description
    examples = "\n".join(msgspec.json.encode(example).decode() for example in tool.input_examples)
    return f"{tool.description or ''}\n\nExamples of inputs:\n{examples}".lstrip()


def _choice(choice: AnthropicToolChoice | None, tools: Sequence[Tool]) -> tuple[str, bool]:
    """Return the tool choice, and whether several tools may be called in parallel."""
    if choice is None:
        return "auto", True
    if not tools and choice.type not in ("none", "auto"):
        raise invalid("tool_choice", "tool_choice is only allowed with tools.")
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid("tool_choice.name", "name is required with the type 'tool' and not allowed otherwise.")
    if choice.name is not None and choice.name not in {tool.name for tool in tools}:
        raise invalid("tool_choice.name", f"There is no tool {choice.name!r}.")
    return choice.name or _CHOICES[choice.type], not choice.disable_parallel_tool_use


def _sampling(parsed: MessagesBody) -> SamplingParams:
    within("temperature", parsed.temperature, 0, 1)
    values: dict[str, Any] = {"temperature": parsed.temperature, "top_k": parsed.top_k, "top_p": parsed.top_p}
    params = SamplingParams(
        stop=tuple(parsed.stop_sequences or ()),
        max_tokens=parsed.max_tokens,
        **{name: value for name, value in values.items() if value is not None},
    )
    check_ranges(params, stop="stop_sequences")
    return params


def _breakpoints(parsed: CountBody, conversation: Conversation) -> tuple[Breakpoint, ...]:
    """Return the breakpoints in the order of the prompt: tools, system, messages."""
    breakpoints = [
        Breakpoint(tool.cache_control.seconds, tools=number)
        for number, tool in enumerate(parsed.tools or (), 1)
        if tool.cache_control is not None
    ]
    breakpoints += conversation.breakpoints
    if parsed.cache_control is not None:
        end = Breakpoint(parsed.cache_control.seconds, messages=len(conversation.messages))
        last = breakpoints[-1] if breakpoints else None
        length = len(conversation.messages[-1]["content"])
        if last is None or (last.messages, last.characters or length) != (end.messages, length):
            breakpoints.append(end)
        elif last.seconds != end.seconds:
            raise invalid("cache_control", "The last block has a cache_control with another ttl.")
    if len(breakpoints) > MAX_BREAKPOINTS:
        raise invalid(
            "cache_control", f"At most {MAX_BREAKPOINTS} blocks may have cache_control, not {len(breakpoints)}."
        )
    if any(previous.seconds < next_.seconds for previous, next_ in pairwise(breakpoints)):
        raise invalid("cache_control.ttl", "A cache_control with ttl '1h' must not come after one with '5m'.")
    return tuple(breakpoints)
