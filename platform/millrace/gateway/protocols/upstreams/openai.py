"""Chat completion requests to OpenAI-compatible upstreams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from inference_worker.contract.upstream_presets import UpstreamPreset
from inference_worker.contract.upstreams import UpstreamSpec
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, ReasoningOptions, Tool
from millrace.gateway.protocols.tools import template_tool

# Fields of an earlier answer that clients return and that no other server takes.
_OWN_FIELDS = frozenset({"annotations", "audio", "reasoning_details", "thinking_blocks", "provider_specific_fields"})
_REASONING_FIELDS = frozenset({"reasoning_content", "reasoning"})
_LOW_BUDGET, _MEDIUM_BUDGET = 1024, 8192


def fields(
    upstream: UpstreamSpec,
    preset: UpstreamPreset,
    request: InferenceRequest,
    parameters: dict[str, Any],
    source: Mapping[str, Any],
    raw: Mapping[str, Any],
    ignored: dict[str, None],
) -> dict[str, Any]:
    """Return the fields of a chat completion request.

    Args:
        source: the fields of the request's body, in any dialect.
        raw: the same, if the body is a chat completion request.
        ignored: names of fields without effect, from which those that are carried are removed.

    Raises:
        ApiError: 400, the upstream lacks something that changes the result.
    """
    if raw:
        messages = [_clean_message(message, upstream, preset) for message in raw["messages"]]
    else:
        messages = [_message(message, upstream) for message in request.prompt if isinstance(message, dict)]
    if request.template.continues and "continue_final_message" not in preset.parameters:
        message = "This model's provider does not continue a message of the assistant. Add a message of the user."
        raise ApiError("unsupported_parameter", message, "messages")
    made: dict[str, Any] = {"messages": messages, **rename_parameters(preset, parameters)}
    made |= _tools(preset, request)
    made |= _format(preset, request, source)
    if (effort := _effort(request.reasoning, upstream, preset)) is not None:
        made["reasoning_effort"] = effort
        for name in request.reasoning.names:
            ignored.pop(name, None)
    if request.breakpoints:
        ignored["cache_control" if "max_tokens" in source and "messages" in source and not raw else "prompt_cache"] = (
            None
        )
    return made


def rename_parameters(preset: UpstreamPreset, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters by their names at the upstream."""
    names = {"seed": preset.seed, "repetition_penalty": preset.repetition_penalty}
    found = {names.get(name, name): value for name, value in parameters.items()}
    if "logit_bias" in found:
        found["logit_bias"] = {str(token): bias for token, bias in found["logit_bias"]}
    return found


def _clean_message(message: dict[str, Any], upstream: UpstreamSpec, preset: UpstreamPreset) -> dict[str, Any]:
    """Return a message as it was sent, without fields that the upstream would reject."""
    dropped = _OWN_FIELDS if upstream.reasoning else _OWN_FIELDS | _REASONING_FIELDS
    kept = {name: value for name, value in message.items() if name not in dropped}
    if preset.max_tokens == "max_tokens" and kept.get("role") == "developer":  # a name of OpenAI's own API
        kept["role"] = "system"
    content = kept.get("content")
    if isinstance(content, list) and preset.cache_key != "prompt_cache_key":
        kept["content"] = [
            {name: value for name, value in part.items() if name != "prompt_cache_breakpoint"} for part in content
        ]
    return kept


def _message(message: dict[str, Any], upstream: UpstreamSpec) -> dict[str, Any]:
    """Return a message of the internal form."""
    made: dict[str, Any] = {"role": message["role"], "content": _content(message)}
    if message["role"] == "tool":
        made["tool_call_id"] = message["tool_call_id"]
        return made
    if "name" in message:
        made["name"] = message["name"]
    if upstream.reasoning and "reasoning_content" in message:
        made["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in calls]
        made["content"] = made["content"] or None
    return made


def _content(message: dict[str, Any]) -> str | list[dict[str, Any]]:
    if "parts" not in message:
        return str(message["content"])
    parts: list[dict[str, Any]] = []
    for part in message["parts"]:
        if part["type"] == "text":
            parts.append({"type": "text", "text": part["text"]})
        else:
            detail = {"detail": part["detail"]} if part.get("detail") else {}
            parts.append({"type": "image_url", "image_url": {"url": part["url"], **detail}})
    return parts


def _call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {**call, "function": {"name": call["function"]["name"], "arguments": text}}


def _tools(preset: UpstreamPreset, request: InferenceRequest) -> dict[str, Any]:
    allowed = [tool for tool in request.tools if request.allowed_tools is None or tool.name in request.allowed_tools]
    choice = request.tool_choice
    if not allowed:
        return {}
    if "tool_choice" not in preset.parameters:
        if choice == "none":
            return {}
        if choice != "auto":
            message = "This model's provider cannot be required to call a tool. Set tool_choice to 'auto'."
            raise ApiError("unsupported_parameter", message, "tool_choice")
    made: dict[str, Any] = {"tools": [_tool(tool) for tool in allowed]}
    if choice in ("none", "required"):
        made["tool_choice"] = choice
    elif choice != "auto":
        made["tool_choice"] = {"type": "function", "function": {"name": choice}}
    if not request.parallel_tools and "parallel_tool_calls" in preset.parameters:
        made["parallel_tool_calls"] = False
    return made


def _tool(tool: Tool) -> dict[str, Any]:
    made = template_tool(tool)
    if tool.description is None:
        del made["function"]["description"]
    if not tool.parameters:
        made["function"]["parameters"] = {"type": "object", "properties": {}}
    if tool.strict:
        made["function"]["strict"] = True
    return made


def _format(preset: UpstreamPreset, request: InferenceRequest, source: Mapping[str, Any]) -> dict[str, Any]:
    spec = request.structured
    if spec is None:
        return {}
    kind = spec.constraint_type
    if kind not in preset.parameters:
        message = f"This model's provider does not support {spec.param}. Omit it, or use another model."
        raise ApiError("unsupported_parameter", message, spec.param)
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind in ("regex", "grammar"):
        return {"structured_outputs": {kind: spec.text}}
    given = source.get("response_format")
    if isinstance(given, dict) and given.get("type") == "json_schema":  # a chat completion request
        return {"response_format": given}
    text = (request.analysis.checked and request.analysis.checked.answer) or spec.text
    schema: dict[str, Any] = {"name": "answer", "schema": msgspec.json.decode(text), "strict": True}
    text_format = (source.get("text") or {}).get("format") if isinstance(source.get("text"), dict) else None
    if isinstance(text_format, dict):  # a Responses request
        schema = {name: value for name, value in text_format.items() if name != "type" and value is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _effort(options: ReasoningOptions, upstream: UpstreamSpec, preset: UpstreamPreset) -> str | None:
    if not upstream.reasoning or "reasoning_effort" not in preset.parameters or not options.names:
        return None
    if options.effort is not None:
        return options.effort
    if options.budget is None:
        return None
    return "low" if options.budget <= _LOW_BUDGET else "medium" if options.budget <= _MEDIUM_BUDGET else "high"
