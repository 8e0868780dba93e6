"""The grammar text of a structured output format. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from inference_worker.contract.request import RequestRejected, StructuredSpec
from inference_worker.engine.structured_output.schemas import enforceable, read_object

MAX_PATTERN_BYTES = 16 << 10
_ANY_OBJECT = {"type": "object"}
_CALL = "<tool_call>"
_TOOL_RULES = r"""
WS: / |\n {0,8}/
TEXT: /(?s:.*)/
head[lazy]: TEXT "<tool_call>"
body: WS? "{" WS? "\"name\"" WS? ":" WS? named WS? "}" WS? "</tool_call>"
"""


def grammar_text(spec: StructuredSpec, *, any_arguments: Sequence[str] = ()) -> str:
    """Return the grammar in the format of the grammar library.

    Args:
        any_arguments: names of tools whose arguments may be any object.

    Raises:
        RequestRejected: the format is malformed or cannot be enforced.
    """
    if spec.constraint_type == "json_schema":
        return _json(enforceable(read_object(spec.text, "the schema", spec.param), spec.param))
    if spec.constraint_type == "json_object":
        return _json(enforceable(_ANY_OBJECT, spec.param))
    if spec.constraint_type == "tools":
        return _lark(_tools(read_object(spec.text, "tools", spec.param), spec.param, any_arguments))
    if len(spec.text) > MAX_PATTERN_BYTES:
        raise RequestRejected("invalid_schema", f"larger than {MAX_PATTERN_BYTES >> 10} KiB", spec.param)
    return _regex(spec.text) if spec.constraint_type == "regex" else _grammar(spec)


def iter_tools(spec: StructuredSpec) -> Iterator[tuple[str, bool, StructuredSpec]]:
    """Yield the tools of `spec`: name, whether it is strict, and the format of a single call."""
    request = read_object(spec.text, "tools", spec.param)
    for tool in request["tools"]:
        alone = {"tools": [tool], "choice": "required", "parallel": False}
        yield tool["name"], bool(tool.get("strict")), StructuredSpec("tools", json.dumps(alone), spec.param)


def _json(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _regex(pattern: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def _grammar(spec: StructuredSpec) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return _lark(any_to_lark(spec.text))
    except Exception as exc:  # noqa: BLE001 - the library raises plain Exception for what it cannot convert
        raise RequestRejected("invalid_schema", f"the grammar cannot be read: {str(exc)[:200]}", spec.param) from None


def _tools(request: dict[str, Any], param: str, any_arguments: Sequence[str]) -> str:
    choice, tools = request["choice"], request["tools"]
    named = tools if choice in ("auto", "required") else [tool for tool in tools if tool["name"] == choice]
    if not named:
        raise RequestRejected("invalid_value", f"there is no tool {choice}", param)
    more = f'(WS? "{_CALL}" body)*' if request.get("parallel", True) else ""
    rules = [_TOOL_RULES, "named: " + " | ".join(f"tool_{i}" for i in range(len(named)))]
    if choice != "auto":
        rules.append(f'start: "{_CALL}" body {more}')
    elif "answer" in request:  # an output without calls has its own schema
        rules.append(f'start: answer | "{_CALL}" body {more}')
        rules.append("answer: %json " + json.dumps(enforceable(request["answer"], param)))
    else:
        rules.append(f"start: TEXT | head body {more}")
    for i, tool in enumerate(named):
        arguments = _ANY_OBJECT if tool["name"] in any_arguments else {**_ANY_OBJECT, **tool["parameters"]}
        name = json.dumps(json.dumps(tool["name"]))
        schema = json.dumps(enforceable(arguments, param))
        rules.append(f'tool_{i}: {name} WS? "," WS? "\\"arguments\\"" WS? ":" WS? %json {schema}')
    return "\n".join(rules)
