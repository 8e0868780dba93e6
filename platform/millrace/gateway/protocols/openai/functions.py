"""OpenAI's older names of tools: `functions`, `function_call` and the role `function`."""

from __future__ import annotations

from typing import Any

from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.protocols.unknown_fields import IgnoredFields


def convert_functions(fields: dict[str, Any], _: IgnoredFields) -> None:
    """Replace the older names in a decoded body by `tools`, `tool_choice` and `tool_calls`.

    Raises:
        ApiError: 400, older and newer names are combined, or a function message has no call.
    """
    functions, choice = fields.get("functions"), fields.pop("function_call", None)
    if isinstance(functions, list) and functions:
        if "tools" in fields or "tool_choice" in fields:
            raise ApiError("invalid_value", "functions is an older name of tools. Set only one of them.", "functions")
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
        fields["parallel_tool_calls"] = False
        if choice is not None:
            fields["tool_choice"] = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    elif choice not in (None, "none", "auto"):
        raise invalid("function_call", "function_call is only allowed with functions.")
    messages = fields.get("messages")
    if isinstance(messages, list):
        _convert_messages(messages)


def _convert_messages(messages: list[Any]) -> None:
    """Replace function calls and their results by tool calls and tool messages, which have IDs."""
    last_call: dict[str, str] = {}  # function name -> ID of its last call
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if "function_call" in message and message.get("role") == "assistant":
            call = message.pop("function_call")
            if isinstance(call, dict) and not message.get("tool_calls"):
                last_call[str(call.get("name"))] = call_id = f"call_{number}"
                message["tool_calls"] = [{"id": call_id, "type": "function", "function": call}]
        elif message.get("role") == "function":
            name = str(message.get("name"))
            if name not in last_call:
                text = "A function message must have the name of a function that an earlier message calls."
                raise invalid(f"messages[{number}].name", text)
            message["role"], message["tool_call_id"] = "tool", last_call[name]
