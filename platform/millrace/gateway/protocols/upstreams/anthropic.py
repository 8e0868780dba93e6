"""Messages requests to Anthropic-compatible upstreams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from inference_worker.contract.upstreams import UpstreamSpec
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import Breakpoint, InferenceRequest, Tool
from millrace.gateway.protocols.upstreams.images import DATA_URL

MIN_BUDGET = 1024  # tokens of thinking
DEFAULT_BUDGET = 16_384  # tokens of an effort without a limit
_CARRIED = ("messages", "system", "cache_control", "thinking", "output_config", "tool_choice")
_TTL = {300: "5m", 3600: "1h"}


def fields(
    upstream: UpstreamSpec,
    request: InferenceRequest,
    parameters: dict[str, Any],
    raw: Mapping[str, Any],
    ignored: dict[str, None],
) -> dict[str, Any]:
    """Return the fields of a Messages request.

    Args:
        raw: the fields of the request's body, if it is a Messages request.
        ignored: names of fields without effect, from which those that are carried are removed.

    Raises:
        ApiError: 400, the upstream lacks something that changes the result.
    """
    if parameters.get("temperature", 0.0) > 1:
        raise invalid("temperature", "This model's provider takes a temperature from 0 to 1.")
    parameters = {name: value for name, value in parameters.items() if name != "n"}
    if "stop" in parameters:
        parameters["stop_sequences"] = list(parameters.pop("stop"))
    made = {name: raw[name] for name in _CARRIED if name in raw} if raw else _conversation(request)
    made |= parameters
    made |= _tools(request, raw)
    if raw:
        if "tools" not in made:  # all of them are tools that the provider would run
            made.pop("tool_choice", None)
        if "output_format" in raw:
            made["output_config"] = {**raw.get("output_config", {}), "format": raw["output_format"]}
        if upstream.reasoning:
            for name in request.reasoning.names:
                ignored.pop(name, None)
        else:
            made.pop("thinking", None)
        return made
    if (spec := request.structured) is not None:
        if spec.constraint_type != "json_schema":
            message = f"This model's provider supports JSON schemas only. {spec.param} has another format."
            raise ApiError("unsupported_parameter", message, spec.param)
        output_format = {"type": "json_schema", "schema": msgspec.json.decode(spec.text)}
        made["output_config"] = {"format": output_format}
    if (budget := _budget(upstream, request)) is not None:
        made["thinking"] = {"type": "enabled", "budget_tokens": budget}
        for name in request.reasoning.names:
            ignored.pop(name, None)
    return made


def _budget(upstream: UpstreamSpec, request: InferenceRequest) -> int | None:
    """Return the tokens of thinking that the request asks for; None: none, or there is no room for the minimum."""
    options, limit = request.reasoning, request.max_tokens
    if not upstream.reasoning or not options.is_enabled or not options.names:
        return None
    budget = max(MIN_BUDGET, options.budget or DEFAULT_BUDGET)
    if limit is not None:
        budget = min(budget, limit - 1)
    return budget if budget >= MIN_BUDGET else None


def _conversation(request: InferenceRequest) -> dict[str, Any]:
    """Return the messages of the internal form: texts of the system first, then turns that alternate."""
    breakpoints = {point.messages: point for point in request.breakpoints if point.tools is None}
    system: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(request.prompt, 1):
        if not isinstance(message, dict):
            continue
        role = message["role"]
        blocks = _blocks(message)
        if (point := breakpoints.get(number)) is not None:
            blocks = _mark_blocks(blocks, point)
        if role == "system" and not turns:
            system += blocks
            continue
        role = "assistant" if role == "assistant" else "user"  # later texts of the system are the user's
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    if not turns:
        raise invalid("messages", "This model's provider needs a message of the user.")
    for turn in turns:
        turn["content"] = turn["content"] or [{"type": "text", "text": " "}]
    return {"messages": turns, **({"system": system} if system else {})}


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    for part in message.get("parts") or [{"type": "text", "text": message["content"]}]:
        if part["type"] == "image":
            content.append({"type": "image", "source": _image_source(part["url"])})
        elif part["text"]:
            content.append({"type": "text", "text": part["text"]})
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, dict):
            raise invalid("messages", "The arguments of a tool call must be a JSON object for this model's provider.")
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return content


def _image_source(url: str) -> dict[str, str]:
    if (match := DATA_URL.fullmatch(url)) is not None:
        return {"type": "base64", "media_type": match.group(1), "data": match.group(2)}
    return {"type": "url", "url": url}


def _mark_blocks(blocks: list[dict[str, Any]], point: Breakpoint) -> list[dict[str, Any]]:
    """Return the blocks with a cache breakpoint after the point's characters of text, or at the end."""
    control = {"cache_control": {"type": "ephemeral", "ttl": _TTL[point.seconds]}}
    remaining = point.characters
    for index, block in enumerate(blocks):
        if remaining is None or block["type"] != "text":
            continue
        text = block["text"]
        if 0 < remaining < len(text):
            before, after = {**block, "text": text[:remaining]}, {**block, "text": text[remaining:]}
            return [*blocks[:index], {**before, **control}, after, *blocks[index + 1 :]]
        if remaining == len(text):
            return [*blocks[:index], {**block, **control}, *blocks[index + 1 :]]
        remaining -= len(text)
    return [*blocks[:-1], {**blocks[-1], **control}] if blocks else blocks


def _tools(request: InferenceRequest, raw: Mapping[str, Any]) -> dict[str, Any]:
    allowed = [tool for tool in request.tools if request.allowed_tools is None or tool.name in request.allowed_tools]
    if not allowed:
        return {}
    names = {tool.name for tool in allowed}
    if raw:  # without tools that the provider runs
        sent = [tool for tool in raw["tools"] if tool.get("name") in names and tool.get("type") in (None, "custom")]
        return {"tools": sent}
    marks = {point.tools: point for point in request.breakpoints if point.tools is not None}
    made: dict[str, Any] = {"tools": [_tool(tool, marks.get(number)) for number, tool in enumerate(allowed, 1)]}
    types = {"auto": "auto", "required": "any", "none": "none"}
    choice: dict[str, Any] = {"type": types.get(request.tool_choice, "tool")}
    if choice["type"] == "tool":
        choice["name"] = request.tool_choice
    if not request.parallel_tools and choice["type"] != "none":
        choice["disable_parallel_tool_use"] = True
    return made if choice == {"type": "auto"} else {**made, "tool_choice": choice}


def _tool(tool: Tool, mark: Breakpoint | None) -> dict[str, Any]:
    made: dict[str, Any] = {"name": tool.name, "input_schema": {"type": "object", **tool.parameters}}
    if tool.description is not None:
        made["description"] = tool.description
    if tool.strict:
        made["strict"] = True
    if mark is not None:
        made["cache_control"] = {"type": "ephemeral", "ttl": _TTL[mark.seconds]}
    return made
