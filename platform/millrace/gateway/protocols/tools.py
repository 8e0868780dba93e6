"""The tools of a request: their limits, their grammar, and their text for templates without tool support."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.output_formats import CallTags, ToolFormat
from inference_worker.contract.request import StructuredSpec
from inference_worker.contract.schema_keywords import value_types
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import InferenceRequest, Tool

MAX_TOOLS = 128
UPSTREAM_CALLS = "upstream"  # as the format of calls: they are not in the text, since an upstream parses them
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_CHOICES = ("auto", "any", "none", "required")  # values of tool_choice, which tools may not be named


def call_id(request_id: str, index: int, number: int, prefix: str = "call_") -> str:
    """Return a call's ID, which is the same whenever its stream is written."""
    return prefix + hashlib.sha256(f"{request_id}/{index}/{number}".encode()).hexdigest()[:24]


def check_tools(tools: Sequence[Tool], name_path: str, max_name_length: int) -> None:
    """Check the number of the tools and their names.

    Raises:
        ApiError: 400 that names the parameter. `name_path` is the path of the name of tool number {}.
    """
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"At most {MAX_TOOLS} tools are allowed, not {len(tools)}.")
    for number, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name) or len(tool.name) > max_name_length or tool.name in _CHOICES:
            reserved = ", ".join(_CHOICES)
            message = (
                f"A tool's name must have 1 to {max_name_length} letters, digits, _ or -, and not be one of {reserved}."
            )
            raise invalid(name_path.format(number), message)
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid("tools", "Two tools have the same name. Names must be unique.")


def require_tool(name: object, tools: Sequence[Tool]) -> str:
    """Return the name of a tool that `tool_choice` refers to.

    Raises:
        ApiError: 400, the request has no such tool.
    """
    if not isinstance(name, str) or name not in {tool.name for tool in tools}:
        raise invalid("tool_choice", f"There is no tool {str(name)[:64]!r}.")
    return name


def allowed_names(names: Iterable[object], tools: Sequence[Tool]) -> tuple[str, ...]:
    """Return the names of the allowed tools, of which there must be at least one.

    Raises:
        ApiError: 400, the request has no such tool, or none is allowed.
    """
    allowed = tuple(require_tool(name, tools) for name in names)
    if not allowed:
        raise invalid("tool_choice", "allowed_tools must name at least one function of tools.")
    return allowed


def call_fields(request: InferenceRequest, model: ServedModel) -> dict[str, Any]:
    """Return the fields of `ResponseSpec` for the model's tool calls."""
    return response_fields(request, model.tokenizer) if model.upstream is None else upstream_response_fields(request)


def upstream_response_fields(request: InferenceRequest) -> dict[str, Any]:
    """Return the fields of `ResponseSpec` for tool calls that an upstream parses."""
    if not request.tools or request.tool_choice == "none":
        return {}
    names = [tool.name for tool in request.tools]
    return {"tools": names, "tool_format": UPSTREAM_CALLS, "max_calls": 0 if request.parallel_tools else 1}


def response_fields(request: InferenceRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of `ResponseSpec` with which the tool calls of a model's text are parsed."""
    if not request.tools or request.tool_choice == "none" or tokenizer.tool_format is None:
        return {}
    names = [tool.name for tool in request.tools] if request.allowed_tools is None else list(request.allowed_tools)
    max_calls = 0 if request.parallel_tools else 1
    fields = {"tools": names, "tool_format": tokenizer.tool_format.name, "max_calls": max_calls}
    if request.structured is not None:
        fields["expects_json"] = True
    if tokenizer.tool_format.tags is not None:
        fields["parameter_types"] = {tool.name: _parameter_types(tool) for tool in request.tools if tool.name in names}
    return fields


def _parameter_types(tool: Tool) -> dict[str, list[str]]:
    """Return the JSON types of the tool's parameters that have some."""
    properties = tool.parameters.get("properties")
    found = properties.items() if isinstance(properties, dict) else ()
    known: dict[int, frozenset[str]] = {}
    types = {name: sorted(value_types(schema, tool.parameters, known=known)) for name, schema in found}
    return {name: names for name, names in types.items() if names}


def spec(request: InferenceRequest, form: ToolFormat | None) -> StructuredSpec | None:
    """Return the structure that constrains the request's tool calls, and the text outside them.

    Args:
        form: the format of the model's tool calls; None: they are not parsed.
    """
    if not request.tools or request.tool_choice == "none" or form is None:
        return request.structured
    if not form.opening and request.tool_choice == "auto" and request.structured is None:
        return None  # without a mark, the beginning of a call is also the beginning of a text
    callable_tools = [
        tool for tool in request.tools if request.allowed_tools is None or tool.name in request.allowed_tools
    ]
    content: dict[str, Any] = {
        "tools": [_enforced_tool(tool) for tool in callable_tools],
        "choice": request.tool_choice,
        "parallel": request.parallel_tools
        and request.tool_choice in ("auto", "required"),  # a named tool is called once
        "format": form.name,
    }
    answer_spec = request.structured
    if answer_spec is not None:
        content["answer"] = (
            json.loads(answer_spec.text) if answer_spec.constraint_type == "json_schema" else {"type": "object"}
        )
    return StructuredSpec("tools", msgspec.json.encode(content).decode(), "tools")


def _enforced_tool(tool: Tool) -> dict[str, Any]:
    parameters = tool.parameters if tool.enforced is None else tool.enforced
    return {"name": tool.name, "parameters": parameters, "strict": tool.strict}


def template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool in the format of chat templates."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}
    return {"type": "function", "function": function}


_INSTRUCTIONS = """You can call functions. Their signatures are within <tools></tools>:
<tools>
{}
</tools>

To call a function, answer with its name and its arguments in this format:
{}"""


def render_tools_as_text(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], form: ToolFormat, *, keeps_calls: bool = False
) -> list[dict[str, Any]]:
    """Return the messages for a template without tool support.

    The tools are described in the system message. Calls and results are text, unless `keeps_calls` is set.
    """
    plain = list(messages) if keeps_calls else [_plain(message, form) for message in messages]
    if tools:
        example = write_call(form, "<name>", None)
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        instructions = _INSTRUCTIONS.format(described, example)
        if plain and plain[0]["role"] == "system":
            # Tools come first, as in templates that support them.
            plain[0] = {"role": "system", "content": f"{instructions}\n\n{plain[0]['content']}"}
        else:
            plain.insert(0, {"role": "system", "content": instructions})
    return plain


def _plain(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [write_call(form, function["name"], function["arguments"]) for function in functions]
    return {"role": message["role"], "content": "\n".join([content, *calls] if content else calls)}


def write_call(form: ToolFormat, name: str, arguments: Any) -> str:
    """Return a call as the format writes it, alone in its list. `arguments` is None in an example of the format."""
    values = arguments if isinstance(arguments, dict) else {}
    encoded = "<arguments as a JSON object>" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    if form.syntax == "python":
        keywords = ", ".join(f"{key}={value!r}" for key, value in values.items())
        return f"[{name}({'<argument>=<value>, ...' if arguments is None else keywords})]"
    if form.syntax == "named_json":
        return f"{form.opening}{name}{form.separator}{encoded}"
    if form.syntax == "gemma":
        fields = "{<argument>:<value>}" if arguments is None else _gemma_value(values)
        return f"{form.opening}call:{name}{fields}{form.closing}"
    if form.tags is not None:
        return form.opening + _call_in_tags(form.tags, name, arguments) + form.closing
    body = f'{{"name": {json.dumps(name)}, "{form.arguments_key}": {encoded}}}'
    if form.syntax == "json_list":
        return f"{form.opening}[{body}]"
    return f"{form.opening}\n{body}\n{form.closing}" if form.opening else body


def _call_in_tags(tags: CallTags, name: str, arguments: Any) -> str:
    values = {"<argument>": "<value>"} if arguments is None else arguments if isinstance(arguments, dict) else {}
    texts = {
        key: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for key, each in values.items()
    }
    written = "".join(
        tags.key[0] + key + tags.key[1] + tags.value[0] + text + tags.value[1] for key, text in texts.items()
    )
    return tags.name[0] + name + tags.name[1] + written + tags.end


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return json.dumps(value)
