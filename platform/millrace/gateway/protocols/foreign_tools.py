"""Tools that this platform does not run, in conversations and definitions of other platforms.

Calls with a readable result become a call and a result of a function, texts become texts, and the rest is dropped and
named. The functions change decoded bodies, and run only for bodies that are otherwise invalid.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from inference_worker.contract.spelling import edit_distance
from millrace.gateway.protocols.unknown_fields import IgnoredFields

MAX_TYPO_EDITS = 2  # edits of a known type that are a typo
MAX_DEPTH = 6  # objects within a result whose texts are read
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"})
_RESULT_TEXTS = (
    *("title", "url", "filename", "text", "logs", "stdout", "stderr", "output", "outputs", "results", "content"),
    *("source", "error"),
)
_CALL_ARGUMENTS = ("input", "action", "operation", "code", "queries", "commands")
_CALL_RESULTS = ("output", "outputs", "results", "error")
_OWN_ITEMS = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_ITEM = re.compile(r"\w+_(call|call_output|output)|(mcp|tool|compaction|context|program)\w*|\w+_(request|response)")
_CALL_BLOCKS = re.compile(r"\w+_tool_use")
_RESULT_BLOCKS = re.compile(r"\w+_tool_result")
_OTHER_BLOCKS = frozenset({"container_upload", "tool_reference", "fallback", "compaction_delta"})


def remove_foreign_tools(fields: dict[str, Any], own: Collection[str], ignored: IgnoredFields) -> None:
    """Remove the tools of other types from a decoded body, and name their types.

    They are not offered to the model. A `tool_choice` that names one is refused later.

    Args:
        own: the types of tools that the endpoint reads. A probable typo of one is left, and refused later.
    """
    tools = fields.get("tools")
    if isinstance(tools, list):
        fields["tools"] = [tool for tool in tools if not _is_foreign(tool, own, ignored)]


def _is_foreign(tool: Any, own: Collection[str], ignored: IgnoredFields) -> bool:
    type_ = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(type_, str) or any(edit_distance(type_[:16], name) <= MAX_TYPO_EDITS for name in own):
        return False
    ignored.add_known(f"tools[].{type_}")
    return True


def read_text(value: Any, depth: int = 0) -> str:
    """Return the texts of a tool's result, without encrypted parts and media."""
    if isinstance(value, str):
        return value
    if depth >= MAX_DEPTH:
        return ""
    if isinstance(value, list):
        return "\n".join(filter(None, (read_text(item, depth + 1) for item in value)))
    if not isinstance(value, dict):
        return ""
    if value.get("type") == "text" and isinstance(value.get("data"), str):  # the source of a document
        return str(value["data"])
    return "\n".join(filter(None, (read_text(value[name], depth + 1) for name in _RESULT_TEXTS if name in value)))


# Chat completions.


def adapt_chat(fields: dict[str, Any], ignored: IgnoredFields) -> None:
    """Adapt the tools and messages of a chat completion request."""
    remove_foreign_tools(fields, ("function",), ignored)
    choice = fields.get("tool_choice")
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list) and allowed["tools"]:
        remove_foreign_tools(allowed, ("function",), ignored)
        if not allowed["tools"] and allowed.get("mode") == "auto":
            fields["tool_choice"] = "none"
    messages = fields.get("messages")
    if isinstance(messages, list):
        dropped: set[str] = set()  # IDs of dropped calls
        fields["messages"] = [
            adapted for message in messages for adapted in _adapt_chat_message(message, dropped, ignored)
        ]


def _adapt_chat_message(message: Any, dropped: set[str], ignored: IgnoredFields) -> list[Any]:
    if not isinstance(message, dict):
        return [message]
    if message.get("role") == "tool" and str(message.get("tool_call_id")) in dropped:
        return []
    results: list[Any] = []
    if message.get("role") == "assistant" and isinstance(message.get("tool_calls"), list):
        calls = [_adapt_chat_call(call, dropped, ignored) for call in message["tool_calls"]]
        message["tool_calls"] = [call for call in calls if call is not None]
        if not message["tool_calls"]:
            del message["tool_calls"]
            if message.get("content") is None:
                message["content"] = ""
    if isinstance(message.get("content"), list):
        parts = [_adapt_chat_part(part, message, results, dropped, ignored) for part in message["content"]]
        message["content"] = [part for part in parts if part is not None]
        if results and not message["content"]:
            return results
    return [*results, message]


def _adapt_chat_call(call: Any, dropped: set[str], ignored: IgnoredFields) -> Any:
    """Return a call of a function, or None for the call of a tool that another platform runs."""
    type_ = call.get("type") if isinstance(call, dict) else None
    if not isinstance(type_, str) or type_ == "function":
        return call
    custom = call.get("custom")
    if type_ == "custom" and isinstance(custom, dict) and isinstance(custom.get("input"), str):
        arguments = msgspec.json.encode({"input": custom["input"]}).decode()
        return {"id": call.get("id"), "function": {"name": custom.get("name"), "arguments": arguments}}
    dropped.add(str(call.get("id")))
    ignored.add_known(f"messages[].tool_calls[].{type_}")
    return None


def _adapt_chat_part(
    part: Any, message: dict[str, Any], results: list[Any], dropped: set[str], ignored: IgnoredFields
) -> Any:
    """Return a part, or None if it was dropped or became a call of the message or one of the results before it."""
    type_ = part.get("type") if isinstance(part, dict) else None
    if not isinstance(type_, str):
        return part
    if type_ in _TEXT_PARTS and isinstance(part.get("text"), str):
        return part if type_ == "text" else {"type": "text", "text": part["text"]}
    if type_ == "tool_use" and message.get("role") == "assistant" and isinstance(part.get("input"), dict):
        arguments = msgspec.json.encode(part["input"]).decode()
        function = {"name": part.get("name"), "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": part.get("id"), "type": "function", "function": function})
        return None
    if type_ == "tool_result" and str(part.get("tool_use_id")) not in dropped:
        results.append(
            {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": read_text(part.get("content"))}
        )
        return None
    if type_ in _REASONING_PARTS or type_ == "tool_result" or _is_foreign_block(type_):
        ignored.add_known(f"messages[].content[].{type_}")
        return None
    return part


def _is_foreign_block(type_: str) -> bool:
    patterns = (_CALL_BLOCKS, _RESULT_BLOCKS)
    return type_ in _OTHER_BLOCKS or any(pattern.fullmatch(type_) for pattern in patterns)


# Messages.


def adapt_messages(fields: dict[str, Any], ignored: IgnoredFields) -> None:
    """Adapt the tools and messages of a Messages request."""
    remove_foreign_tools(fields, ("custom", "function"), ignored)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [turn for message in messages for turn in _adapt_turn(message, ignored)]


def _adapt_turn(message: Any, ignored: IgnoredFields) -> list[Any]:
    """Return the message, or several if it has results of tools that another platform ran during the turn."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
    blocks = [block for block in content if isinstance(block, dict)]
    texts = {
        str(block.get("tool_use_id")): read_text(block.get("content"))
        for block in blocks
        if _RESULT_BLOCKS.fullmatch(str(block.get("type")))
    }
    turns: list[Any] = [{**message, "content": []}]
    for block in content:
        type_ = block.get("type") if isinstance(block, dict) else None
        if not isinstance(type_, str) or type_ in ("tool_use", "tool_result"):
            _drop_references(block, ignored)
            turns[-1]["content"].append(block)
        elif _CALL_BLOCKS.fullmatch(type_):
            if texts.get(str(block.get("id"))):
                turns[-1]["content"].append({**_present(block, ("id", "name", "input")), "type": "tool_use"})
            if type_ != "mcp_tool_use" or not texts.get(str(block.get("id"))):
                ignored.add_known(f"messages[].content[].{type_}")
        elif _RESULT_BLOCKS.fullmatch(type_):
            if text := texts[str(block.get("tool_use_id"))]:
                result = {**_present(block, ("tool_use_id", "is_error")), "type": "tool_result", "content": text}
                turns += [{"role": "user", "content": [result]}, {**message, "content": []}]
            if type_ != "mcp_tool_result" or not text:
                ignored.add_known(f"messages[].content[].{type_}")
        elif type_ == "compaction" and isinstance(block.get("content"), str):
            turns[-1]["content"].append({"type": "text", "text": block["content"]})
        elif type_ in _OTHER_BLOCKS or type_ == "compaction":
            ignored.add_known(f"messages[].content[].{type_}")
        else:
            turns[-1]["content"].append(block)
    if len(turns) > 1:
        turns = [turn for turn in turns if turn["content"]]
    elif content and not turns[0]["content"]:
        turns[0]["content"] = ""
    return turns


def _drop_references(block: Any, ignored: IgnoredFields) -> None:
    """Drop references to definitions from the result of a search for tools."""
    content = block.get("content") if isinstance(block, dict) else None
    if isinstance(content, list):
        kept = [part for part in content if not (isinstance(part, dict) and part.get("type") in _OTHER_BLOCKS)]
        if len(kept) < len(content):
            block["content"] = kept
            ignored.add_known("messages[].content[].content[].tool_reference")


def _present(block: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: block[name] for name in names if name in block}


# Responses.


def adapt_items(items: list[dict[str, Any]], ignored: IgnoredFields) -> None:
    """Adapt the input items of a Responses request, in place."""
    outputs = {
        item.get("call_id"): item.get("output")
        for item in items
        if str(item["type"]).endswith("_output") and isinstance(item.get("call_id"), str)
    }
    kept: set[str] = set()  # IDs of calls whose results are items of their own
    adapted: list[dict[str, Any]] = []
    for item in items:
        type_ = item["type"]
        if not isinstance(type_, str) or type_ in _OWN_ITEMS or not _ITEM.fullmatch(type_):
            _adapt_parts(item, ignored)
            adapted.append(item)
        elif type_.endswith("_call"):
            call = _adapt_call(type_, item, outputs, kept)
            if not call or type_ not in ("custom_tool_call", "mcp_call"):
                ignored.add_known(f"input[].{type_}")
            adapted += call
        elif type_.endswith("_output") and str(item.get("call_id")) in kept:
            text = read_text(item.get("output"))
            adapted.append({"type": "function_call_output", "call_id": item["call_id"], "output": text})
        else:
            ignored.add_known(f"input[].{type_}")
    items[:] = adapted


def _adapt_call(
    type_: str, item: Mapping[str, Any], outputs: Mapping[Any, Any], kept: set[str]
) -> list[dict[str, Any]]:
    """Return the call of a function and, if the item has it, its result. Return nothing if no result is readable."""
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        return []
    result = read_text({name: item[name] for name in _CALL_RESULTS if name in item})
    if not result:
        output = outputs.get(call_id)
        if type_ != "custom_tool_call" and not isinstance(output, str) and not read_text(output):
            return []
        kept.add(call_id)
    name = item.get("name")
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(_present(item, _CALL_ARGUMENTS)).decode()
    call = {
        "type": "function_call",
        "call_id": call_id,
        "name": name if isinstance(name, str) else type_.removesuffix("_call"),
        "arguments": arguments,
    }
    return [call, {"type": "function_call_output", "call_id": call_id, "output": result}] if result else [call]


def _adapt_parts(item: dict[str, Any], ignored: IgnoredFields) -> None:
    """Adapt the content of a message, or the output of a function call."""
    for field in ("content", "output"):
        parts = item.get(field)
        if not isinstance(parts, list) or item["type"] == "reasoning":
            continue
        adapted: list[Any] = []
        for part in parts:
            type_ = part.get("type") if isinstance(part, dict) else None
            if type_ == "text" and isinstance(part.get("text"), str):
                adapted.append({"type": "input_text", "text": part["text"]})
            elif isinstance(type_, str) and (type_ in _REASONING_PARTS or _is_foreign_block(type_)):
                ignored.add_known(f"input[].{field}[].{type_}")
            else:
                adapted.append(part)
        item[field] = adapted
