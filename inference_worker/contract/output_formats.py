"""The formats in which model families write tool calls and reasoning. Gateway and worker share them.

A format is chosen from the marks in a model's chat template. A deployment's options `tool_parser` and
`reasoning_parser` override the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

AUTO, NONE = "auto", "none"  # parser names: chosen from the template; no parser

CallSyntax = Literal["json", "json_list", "named_json", "python", "gemma", "tags"]


@dataclass(frozen=True)
class CallTags:
    """The texts around the parts of a call that is written as tags.

    An argument's value is the plain text of a string, or else JSON.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""  # after the arguments; empty: the call's closing mark


@dataclass(frozen=True)
class ToolFormat:
    """The format of one family's tool calls.

    `syntax` is the text of a call after `opening`:

    - "json": an object with the name and the arguments.
    - "json_list": a list of such objects.
    - "named_json": the name and an object of arguments.
    - "python": a list of Python calls with keyword arguments.
    - "gemma": the name and an object with unquoted keys and strings in marks.
    - "tags": the name, the keys and the values between `tags`.
    """

    name: str
    syntax: CallSyntax
    opening: str = ""  # before a call, or before a list of calls; empty: calls are at the start of the answer
    closing: str = ""  # after it
    separator: str = ""  # between the name and the arguments ("named_json"), or between calls without an opening
    padding: str = ""  # after the opening and before the closing
    between: str = ""  # between a closing and the next opening
    arguments_key: str = "arguments"  # key of the arguments in a JSON call
    tags: CallTags | None = None  # texts around the parts of a call in tags


@dataclass(frozen=True)
class ReasoningFormat:
    """The format of one family's reasoning, which precedes the answer."""

    name: str
    starts: tuple[str, ...]  # the marks that may begin the reasoning; the first is the usual one
    ends: tuple[str, ...]  # the marks that may end it
    forced_end: str  # the text that ends reasoning whose budget is used up
    answer_marks: tuple[str, ...] = ()  # marks around the answer, which are not part of its text


_FUNCTION_TAGS = CallTags(
    ("\n<function=", ">\n"), ("<parameter=", ">"), ("\n", "\n</parameter>\n"), end="</function>\n"
)
_ARGUMENT_TAGS = CallTags(("", "\n"), ("<arg_key>", "</arg_key>"), ("\n<arg_value>", "</arg_value>\n"))
HERMES = ToolFormat("hermes", "json", "<tool_call>", "</tool_call>", padding="\n", between="\n")
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        HERMES,
        replace(HERMES, name="qwen3"),
        ToolFormat("llama3_json", "json", separator="; ", arguments_key="parameters"),
        ToolFormat("pythonic", "python"),
        ToolFormat("mistral", "json_list", "[TOOL_CALLS]"),
        ToolFormat("mistral_args", "named_json", "[TOOL_CALLS]", separator="[ARGS]"),
        ToolFormat("granite", "json_list", "<|tool_call|>"),
        ToolFormat("gemma", "gemma", "<|tool_call>", "<tool_call|>"),
        ToolFormat("qwen3_coder", "tags", "<tool_call>", "</tool_call>", between="\n", tags=_FUNCTION_TAGS),
        ToolFormat("glm4", "tags", "<tool_call>", "</tool_call>", between="\n", tags=_ARGUMENT_TAGS),
    )
}
# Marks in a template, and the format of a template that has all of them. The first match is used.
_TOOL_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>",), "granite"),
    (("<|tool_call>", "<tool_call|>"), "gemma"),
    (("<tool_call>", "<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm4"),
    (("<tool_call>", "<think>"), "qwen3"),
    (("<tool_call>",), "hermes"),
    (("[func_name1(",), "pythonic"),
    (("<|python_start|>",), "pythonic"),
    (('"parameters": dictionary',), "llama3_json"),
    (("<|python_tag|>",), "llama3_json"),
)

_THINK = (("<think>",), ("</think>",), "\n</think>\n\n")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat("think", *_THINK),
        ReasoningFormat("qwen3", *_THINK),
        ReasoningFormat("granite", *_THINK[:2], "\n</think>\n<response>", ("<response>", "</response>")),
        ReasoningFormat(
            "granite_text",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            "\n\nHere is my response:\n\n",
        ),
        ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), "[/THINK]"),
        ReasoningFormat("gemma", ("<|channel>thought\n",), ("<channel|>",), "\n<channel|>"),
    )
}
_REASONING_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<think>", "<response>"), "granite"),
    (("Here is my thought process:",), "granite_text"),
    (("[THINK]", "[/THINK]"), "mistral"),
    (("<|channel>thought", "<channel|>"), "gemma"),
    (("<think>", "enable_thinking"), "qwen3"),
    (("<think>",), "think"),
)
# Tokens that are marks of a format. They are part of a completion's text, also where a tokenizer calls them special.
MARK_TOKENS = frozenset(
    {
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|tool_call|>"),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call>", "<tool_call|>", '<|"|>'),
        *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<response>", "</response>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    }
)


def choose_tool_format(name: str, template: str | None) -> ToolFormat | None:
    """Return the format of tool calls: the one with this name, or for "auto" the template's.

    Without marks in the template, calls are in Hermes' format.
    """
    if name == AUTO:
        name = _match(_TOOL_MARKS, template or "") or HERMES.name
    return TOOL_FORMATS.get(name)


def choose_reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """Return the format of reasoning: the one with this name, or for "auto" the template's; None: no reasoning."""
    return REASONING_FORMATS.get(_match(_REASONING_MARKS, template or "") or NONE if name == AUTO else name)


def _match(marks: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str | None:
    return next((name for texts, name in marks if all(text in template for text in texts)), None)
