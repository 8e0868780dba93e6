"""Parsing of tool calls in a model's output, independent of how the text is split."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.output_formats import HERMES
from inference_worker.contract.request import SamplingParams, StructuredSpec
from inference_worker.contract.schema_keywords import value_types
from millrace.gateway.core.types import InferenceRequest, Tool
from millrace.gateway.protocols import tools
from millrace.gateway.protocols.tool_parsers.base import AnswerText, CallArguments, CallStart
from millrace.gateway.protocols.tool_parsers.hermes import HermesParser
from tests.support.engine.tiny_tokenizer import write_tokenizer

NAMES = ("weather", "time")
Found = list[tuple[str, str]]  # (name, arguments) of calls and ("", text), in order


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parse(*texts: str, is_truncated: bool = False) -> Found:
    parser = HermesParser(NAMES)
    pieces = [piece for text in texts for piece in parser.push(text)]
    pieces += parser.close(is_truncated=is_truncated)
    found: Found = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.number == sum(bool(name) for name, _ in found)
            found.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            name, arguments = found[-1]
            assert piece.number == sum(bool(name) for name, _ in found) - 1
            found[-1] = (name, arguments + piece.text)
        else:
            assert piece.text
            if found and not found[-1][0]:
                found[-1] = ("", found[-1][1] + piece.text)
            else:
                found.append(("", piece.text))
    assert parser.calls == sum(bool(name) for name, _ in found)
    return found


PARIS = call("weather", '{"city": "Paris"}')


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("Hello", [("", "Hello")]),
        (" Hello \n", [("", " Hello \n")]),
        (PARIS, [("weather", '{"city": "Paris"}')]),
        (f"Let me see.\n\n{PARIS}\n", [("", "Let me see."), ("weather", '{"city": "Paris"}')]),
        (f"{PARIS}\n{call('time', '{}')}", [("weather", '{"city": "Paris"}'), ("time", "{}")]),
        (f"{PARIS} Done.", [("weather", '{"city": "Paris"}'), ("", " Done.")]),
        (call("weather", '{"a": {"b": "}\\"{</tool_call>"}}'), [("weather", '{"a": {"b": "}\\"{</tool_call>"}}')]),
        ('<tool_call>{"name":"time","arguments":{}}</tool_call>', [("time", "{}")]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "time"}</tool_call>', [("time", '{"x": 1}')]),
        # Not calls: an unknown name, invalid JSON, arguments that are not an object, a wrong tag, a truncated call.
        (call("rm", "{}"), [("", call("rm", "{}"))]),
        ("<tool_call>time</tool_call>!", [("", "<tool_call>time</tool_call>!")]),
        (call("time", "[]"), [("", call("time", "[]"))]),
        ("a < b, <tool", [("", "a < b, <tool")]),
        ("<tool_call> hello", [("", "<tool_call> hello")]),
        # Truncated within its arguments, it is still a call.
        ('<tool_call>{"name": "time", "arguments": {"x": "y', [("time", '{"x": "y')]),
    ],
)
def test_calls_and_text_are_parsed(text: str, found: Found) -> None:
    assert parse(text) == found
    assert parse(*text) == found


def test_a_response_has_only_the_calls_that_the_request_allows(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, [], "{{ messages }}")
    tokenizer = Tokenizer.from_dir(tmp_path)
    defined = tuple(Tool(name, None, {}) for name in NAMES)
    request = InferenceRequest("m", [], SamplingParams(), 1, tools=defined)
    assert tools.response_fields(request, tokenizer) == {
        "tools": ["weather", "time"],
        "tool_format": "hermes",
        "max_calls": 0,
    }
    limited = msgspec.structs.replace(request, allowed_tools=("time",), parallel_tools=False)
    assert tools.response_fields(limited, tokenizer) == {"tools": ["time"], "tool_format": "hermes", "max_calls": 1}
    answers_json = msgspec.structs.replace(request, structured=StructuredSpec("json_object"))
    assert tools.response_fields(answers_json, tokenizer)["expects_json"] is True


def test_a_response_in_tags_has_the_types_of_the_parameters(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, [], "{{ tools }} <tool_call><function=f><parameter=x>")
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "unit": {"$ref": "#/$defs/Unit"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "choice": {"enum": [1, 2.5, True, None]},
            "both": {"allOf": [{"description": "a list"}, {"type": ["array"]}]},
            "any": {"oneOf": [{"type": "string"}, {}]},
            "loop": {"$ref": "#/$defs/Loop"},
            "unknown": {"$ref": "https://example.com/schema"},
        },
        "$defs": {"Unit": {"const": "km"}, "Loop": {"$ref": "#/$defs/Loop"}},
    }
    request = InferenceRequest("m", [], SamplingParams(), 1, tools=(Tool("f", None, schema), Tool("time", None, {})))
    fields = tools.response_fields(request, Tokenizer.from_dir(tmp_path))
    assert fields["tool_format"] == "qwen3_coder"
    assert fields["parameter_types"] == {
        "f": {
            "text": ["string"],
            "unit": ["string"],
            "note": ["null", "string"],
            "choice": ["boolean", "integer", "null", "number"],
            "both": ["array"],
        },
        "time": {},
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<tool_call>{"name": "ti', []),
        ("<tool_call>\n", []),
        ("Let me see.\n<tool_call>", [("", "Let me see.")]),
        ('<tool_call>{"name": "time", "argum', []),
    ],
)
def test_the_beginning_of_a_call_is_no_text_if_the_length_limit_truncates_it(text: str, found: Found) -> None:
    assert parse(text, is_truncated=True) == parse(*text, is_truncated=True) == found
    assert parse(text) == parse(*text) == [("", text)]


_arguments = st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers(), max_size=3).map(json.dumps)
_part = st.one_of(
    st.text(max_size=8),
    st.builds(call, st.sampled_from([*NAMES, "rm"]), _arguments),
    st.sampled_from(["<tool_call>", "</tool_call>", "<tool", "{", '"', "\n", '{"name": "time", "arguments": {']),
)


@given(st.lists(_part, max_size=5).map("".join), st.lists(st.integers(0, 200), max_size=8))
def test_the_result_is_independent_of_the_splitting(text: str, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parse(*(text[start:end] for start, end in itertools.pairwise(edges))) == parse(text)


def test_arguments_are_streamed() -> None:
    parser = HermesParser(NAMES)
    assert parser.push("Hm <tool_call>") == [AnswerText("Hm")]
    assert parser.push('{"name": "weather", "argum') == []
    assert parser.push('ents": {"city"') == [CallStart(0, "weather"), CallArguments(0, '{"city"')]
    assert parser.push(': "Pa') == [CallArguments(0, ': "Pa')]
    assert parser.push('ris"}}</tool_') == [CallArguments(0, 'ris"}')]
    assert parser.push("call>") == parser.close() == []


def test_ids_are_deterministic_and_unique() -> None:
    ids = [tools.call_id("req_1", index, number) for index in range(3) for number in range(3)]
    assert len(set(ids)) == 9
    assert ids[0] == tools.call_id("req_1", 0, 0) != tools.call_id("req_2", 0, 0)


def request(**fields: Any) -> InferenceRequest:
    return InferenceRequest("m", [{"role": "user", "content": "?"}], SamplingParams(), **fields)


def test_the_structured_spec_of_tools() -> None:
    schema = {"type": "object"}
    tool = Tool("f", parameters=schema, strict=True)
    assert tools.spec(request(), HERMES) is None
    assert tools.spec(request(tools=(tool,), tool_choice="none"), HERMES) is None
    spec = tools.spec(request(tools=(tool,), tool_choice="f"), HERMES)
    assert spec is not None
    assert (spec.constraint_type, spec.param) == ("tools", "tools")
    expected = {
        "tools": [{"name": "f", "parameters": schema, "strict": True}],
        "choice": "f",
        "parallel": False,
        "format": "hermes",
    }
    assert json.loads(spec.text) == expected
    for parallel in (True, False):
        spec = tools.spec(request(tools=(tool,), parallel_tools=parallel), HERMES)
        assert spec is not None
        assert json.loads(spec.text)["parallel"] is parallel
    answered = tools.spec(request(tools=(tool,), structured=StructuredSpec("json_schema", '{"type":"string"}')), HERMES)
    assert answered is not None
    assert json.loads(answered.text)["answer"] == {"type": "string"}


def test_a_template_without_tool_support_gets_tools_as_text() -> None:
    made = {"id": "c", "type": "function", "function": {"name": "time", "arguments": {"zone": "é"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "noon", "tool_call_id": "c", "name": "time"},
    ]
    system, user, called, result = tools.render_tools_as_text(
        messages, [tools.template_tool(Tool("time", "Tells the time"))], HERMES
    )
    assert system["content"].endswith("\n\nBe brief.")
    assert '"name": "time", "description": "Tells the time"' in system["content"]
    assert user == messages[1]
    assert called == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "time", "arguments": {"zone": "é"}}\n</tool_call>',
    }
    assert result == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
    assert tools.render_tools_as_text(messages[1:2], [], HERMES) == messages[1:2]
    assert [message["role"] for message in tools.render_tools_as_text(messages[1:2], [{}], HERMES)] == [
        "system",
        "user",
    ]


def test_types_of_definitions_that_refer_to_each_other_are_read_once() -> None:
    levels = 200
    names = {f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(levels)}
    definitions = {"$defs": {**names, f"l{levels}": {"type": "string"}}}
    near = {"$ref": f"#/$defs/l{levels - 40}"}
    assert value_types(near, definitions) == {"string"}  # 2**40 paths lead there
    assert value_types({"$ref": "#/$defs/l0"}, definitions) == set()  # too deep
    itself = {"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}}
    assert value_types({"$ref": "#/$defs/a"}, itself) == set()
