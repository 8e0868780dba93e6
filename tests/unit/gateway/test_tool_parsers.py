"""Parsers of each family's tool calls, independent of how the text is split, and truncated at any character."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.checkpoints.chat_template import ChatTemplate
from inference_worker.contract.output_formats import TOOL_FORMATS, choose_reasoning_format, choose_tool_format
from millrace.gateway.protocols.tool_parsers.base import CallArguments, CallStart, Piece, ToolCallParser
from millrace.gateway.protocols.tool_parsers.registry import TOOL_PARSERS, make_parser
from millrace.gateway.protocols.tools import write_call

NAMES = ("weather", "time", "get", "get_time")
TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
Found = list[tuple[str, Any]]  # (name, arguments) of calls and ("", text), in order


def collect(pieces: list[Piece]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.number == sum(bool(name) for name, _ in found)
            found.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert found[-1][0]
            found[-1] = (found[-1][0], found[-1][1] + piece.text)
        elif found and not found[-1][0]:
            found[-1] = ("", found[-1][1] + piece.text)
        else:
            found.append(("", piece.text))
    return found


# Of parameters in the samples; others may have any type.
TYPES = {
    "weather": {"city": ["string"], "days": ["integer"]},
    "get": {"code": ["string"], "maybe": ["null", "string"], "ratio": ["number"], "list": ["array"]},
}


def parse(form: str, *texts: str, is_truncated: bool = False) -> list[tuple[str, str]]:
    parser = make_parser(form, NAMES, parameter_types=TYPES)
    return collect([piece for text in texts for piece in parser.push(text)] + parser.close(is_truncated=is_truncated))


def decoded(found: list[tuple[str, str]]) -> Found:
    return [(name, json.loads(text) if name else text) for name, text in found]


PARIS = ("weather", {"city": 'Paris, "FR" (é)', "days": 3})
SAMPLES: list[tuple[str, str, Found]] = [
    ("llama3_json", r'{"name": "weather", "parameters": {"city": "Paris, \"FR\" (é)", "days": 3}}', [PARIS]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "weather", "parameters": {"days": 3}}; {"name": "time", "parameters": {}}',
        [("weather", {"days": 3}), ("time", {})],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', [("", '{"name": "Bob", "age": 3}')]),
    ("llama3_json", ' {"name": "get", "arguments": {"x": "}"}} ok', [("get", {"x": "}"}), ("", " ok")]),
    ("llama3_json", 'Sure.\n<|python_tag|>{"name": "time", "parameters": {}}', [("", "Sure."), ("time", {})]),
    ("llama3_json", "<|python_tag|>print(1)", [("", "<|python_tag|>print(1)")]),
    (
        "mistral",
        'Let me see. [TOOL_CALLS] [{"name": "weather", "arguments": {"days": 3}, "id": "VvvODy9mT"},'
        ' {"name": "time", "arguments": {}}] Done',
        [("", "Let me see."), ("weather", {"days": 3}), ("time", {}), ("", " Done")],
    ),
    ("mistral", '[TOOL_CALLS][{"arguments": {"days": 3}, "name": "weather"}]', [("weather", {"days": 3})]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "rm", "arguments": {}}]',
        [("", '[TOOL_CALLS][{"name": "rm", "arguments": {}}]')],
    ),
    (
        "mistral_args",
        '[TOOL_CALLS]get_time[ARGS]{"a": "}"}[TOOL_CALLS]get[CALL_ID]VvvODy9mT[ARGS]{}',
        [("get_time", {"a": "}"}), ("get", {})],
    ),
    ("mistral_args", 'Hm[TOOL_CALLS]get{"x": 1}', [("", "Hm"), ("get", {"x": 1})]),
    (
        "granite",
        '<|tool_call|>[{"name": "weather", "arguments": {"days": 3}}, {"name": "time", "arguments": {}}]',
        [("weather", {"days": 3}), ("time", {})],
    ),
    ("granite", '<tool_call>[{"name": "time", "arguments": {}}]', [("time", {})]),
    ("granite", '<|tool_call|>{"name": "time", "arguments": {}}', [("time", {})]),
    (
        "pythonic",
        "[weather(city=\"Paris, \\\"FR\\\" (é)\", days=3), time(), get(a=[1, 'b'], b={'c': None, 'd': True}, e=-1.5)]",
        [PARIS, ("time", {}), ("get", {"a": [1, "b"], "b": {"c": None, "d": True}, "e": -1.5})],
    ),
    ("pythonic", "[1, 2, 3]", [("", "[1, 2, 3]")]),
    ("pythonic", '[weather("Paris")]', [("", '[weather("Paris")]')]),
    ("pythonic", "<|python_start|>[time()]<|python_end|>", [("time", {})]),
    ("pythonic", '```tool_code\nweather(city="x")\n```\nok', [("weather", {"city": "x"}), ("", "\nok")]),
    ("pythonic", "[get(a=open)]", [("get", {"a": "open"})]),
    ("pythonic", r"[get(a='\ud800', b=NaN, c=1e999)]", [("get", {"a": "\ud800", "b": "NaN", "c": "1e999"})]),
    ("mistral", r'[TOOL_CALLS][{"arguments": {"a": "\ud800"}, "name": "get"}]', [("get", {"a": "\ud800"})]),
    (
        "gemma",
        '<|tool_call>call:weather{city:<|"|>Paris, "FR" (é)<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:get{a:[1,<|"|>x:{<|"|>],b:{c:true,d:null}}<tool_call|>',
        [PARIS, ("get", {"a": [1, "x:{"], "b": {"c": True, "d": None}})],
    ),
    ("gemma", "Hm. <|tool_call>call:time{}<tool_call|>ok", [("", "Hm."), ("time", {}), ("", "ok")]),
    ("gemma", "<|tool_call>nothing<tool_call|>", [("", "<|tool_call>nothing<tool_call|>")]),
    ("qwen3", '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>', [("time", {})]),
    (
        "qwen3_coder",
        'Let me see.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis, "FR" (é)\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n"
        "</tool_call>",
        [("", "Let me see."), PARIS, ("time", {})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get>\n<parameter=code>\n  if a < b:\n    print('<tool_call>')\n\n</parameter>\n"
        '<parameter=list>\n["</parameter>", {"a": 1}]\n</parameter>\n<parameter=ratio>\n2\n</parameter>\n</function>\n'
        "</tool_call> Done",
        [
            (
                "get",
                {"code": "  if a < b:\n    print('<tool_call>')\n", "list": ["</parameter>", {"a": 1}], "ratio": 2},
            ),
            ("", " Done"),
        ],
    ),
    (
        "qwen3_coder",
        "<function=get><parameter=maybe>null</parameter><parameter=code>null</parameter><parameter=x>True</parameter>"
        "<parameter=y>12:30</parameter><parameter=list>none</parameter></function>ok",
        [("get", {"maybe": None, "code": "null", "x": True, "y": "12:30", "list": "none"}), ("", "ok")],
    ),
    ("qwen3_coder", "<function=rm>\n</function>", [("", "<function=rm>\n</function>")]),
    (
        "glm4",
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris, "FR" (é)</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
        [PARIS, ("time", {})],
    ),
    (
        "glm4",  # as of version 4.7, without line breaks
        "<tool_call>get<arg_key>maybe</arg_key><arg_value>3</arg_value><arg_key>list</arg_key>"
        '<arg_value>["</arg_value>"]</arg_value></tool_call><tool_call>get_time</tool_call>',
        [("get", {"maybe": "3", "list": ["</arg_value>"]}), ("get_time", {})],
    ),
    ("glm4", "<tool_call>times</tool_call>", [("", "<tool_call>times</tool_call>")]),
]


@pytest.mark.parametrize(("form", "text", "wanted"), SAMPLES)
def test_calls_and_text_are_parsed(form: str, text: str, wanted: Found) -> None:
    found = parse(form, text)
    assert decoded(found) == wanted
    assert all(part.encode() for _, part in found)
    assert parse(form, *text) == found
    for cut in range(len(text)):
        assert parse(form, text[:cut], text[cut:]) == found


@pytest.mark.parametrize(("form", "text", "wanted"), SAMPLES)
def test_a_truncated_completion_has_no_markup(form: str, text: str, wanted: Found) -> None:
    complete = parse(form, text)
    for cut in range(len(text)):
        found = parse(form, text[:cut], is_truncated=True)
        for (name, part), (whole_name, whole) in itertools.zip_longest(
            found, complete[: len(found)], fillvalue=("", "")
        ):
            assert name == whole_name
            assert whole.startswith(part.rstrip() if not name else part)
        assert len(found) <= len(complete)


MALFORMED: list[tuple[str, str, Found]] = [
    ("pythonic", "Sure:\n```python\n    x = 1\n```", [("", "Sure:\n```python\n    x = 1\n```")]),
    ("pythonic", "  [weather said: 1]\n", [("", "  [weather said: 1]\n")]),
    ("hermes", "Use <tool_call> and </tool_call>.", [("", "Use <tool_call> and </tool_call>.")]),
    ("mistral", "Use [TOOL_CALLS]  x.", [("", "Use [TOOL_CALLS]  x.")]),
    *(
        (form, text, [("", text)])
        for form, text in (("llama3_json", "{"), ("pythonic", "["), ("hermes", "<tool_call>"))
    ),
    ("pythonic", "[get(a=1, *b)] And then", [("get", {"a": 1}), ("", " And then")]),
    ("pythonic", "[get(a=it's)] tail", [("get", {"a": "it's"}), ("", " tail")]),
    ("pythonic", "[get(a=1] tail", [("get", {"a": 1}), ("", " tail")]),
    ("pythonic", "[get(a=1", [("get", {})]),
    ("pythonic", "[get(a=1,), time()]", [("get", {"a": 1}), ("time", {})]),
    ("pythonic", "[time(), rm(x=[1])] tail", [("time", {}), ("", " tail")]),
    ("pythonic", "```tool_code\ntime(), rm()\n``` tail", [("time", {}), ("", " tail")]),
    ("gemma", "<|tool_call>call:get{x:a<b}<tool_call|>ok", [("get", {"x": "a<b"}), ("", "ok")]),
    ("gemma", "<|tool_call>call:get{t:12:30,u:1}<tool_call|>ok", [("get", {"t": "12:30", "u": 1}), ("", "ok")]),
    ("gemma", "<|tool_call>call:get{a:[1,{b:<tool_call|>ok", [("get", {"a": [1, {"b": None}]}), ("", "ok")]),
    ("gemma", '<|tool_call>call:get{a:<|"|>x<|"|>y,b:1}<tool_call|>ok', [("get", {"a": "x"}), ("", "ok")]),
    ("llama3_json", '{"type": "function", "name": "time", "parameters": {}}', [("time", {})]),
    ("llama3_json", '{"name": "time", "parameters": {}}; {"name": "rm"} ok', [("time", {}), ("", " ok")]),
    ("llama3_json", '{"name": "time", "parameters": {}}, and', [("time", {}), ("", ", and")]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "rm"}, {"arguments": {}, "name": "get"}, 1] ok',
        [("time", {}), ("get", {}), ("", " ok")],
    ),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=code>\nx", [("get", {"code": "x"})]),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=ratio>\n1.5", [("get", {"ratio": 1.5})]),
    ("qwen3_coder", "<tool_call>\n<function=get>\nx = 1\n</function>\n</tool_call> ok", [("get", {}), ("", " ok")]),
    ("qwen3_coder", f"<function=get><parameter={'x' * 300}> </function> ok", [("get", {}), ("", " ok")]),
    ("qwen3_coder", "<function=get><parameter=list>[1</parameter>", [("get", {"list": "[1"})]),
    ("glm4", "<tool_call>get\n<arg_key>maybe</tool_call>", [("get", {})]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "time"}', [("time", {})]),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": {}}\n<tool_call>{"arguments": {}, "name": "get"}<tool_call>x',
        [("time", {}), ("get", {}), ("", "<tool_call>x")],
    ),
]


@pytest.mark.parametrize(("form", "text", "wanted"), MALFORMED)
def test_text_after_malformed_calls_remains_text(form: str, text: str, wanted: Found) -> None:
    assert decoded(parse(form, text)) == wanted
    assert decoded(parse(form, *text)) == wanted


LONG_TEXTS = [
    ("pythonic", "[" + "\u3000" * 4000 + "!"),
    ("pythonic", "[" + " " * 4000 + "!"),
    ("pythonic", "[time()" + " " * 4000 + "]"),
    ("mistral", "[TOOL_CALLS]" + " " * 4000 + "get"),
    ("llama3_json", "{" + " " * 4000 + "!"),
    ("llama3_json", " " * 4000 + "{"),
    ("hermes", "<tool_call>" + " " * 4000),
    ("qwen3_coder", "<tool_call>" + " " * 4000),
    ("qwen3_coder", "<function=get>" + " " * 4000 + "</function>" + " " * 4000),
    ("qwen3_coder", "<function=get><parameter=ratio>" + " " * 4000),
    ("qwen3_coder", "<function=get><parameter=code>" + " " * 4000),
]


@pytest.mark.parametrize(("form", "text"), LONG_TEXTS)
def test_long_whitespace_is_not_withheld(form: str, text: str) -> None:
    """The pending text, which each push searches, stays short."""
    parser = make_parser(form, NAMES, parameter_types=TYPES)
    assert isinstance(parser, ToolCallParser)
    pieces = []
    for char in text:
        pieces += parser.push(char)
        assert len(parser._pending) <= 256
    assert collect(pieces + parser.close()) == parse(form, text)


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_calls_after_the_maximum_are_dropped(form: str) -> None:
    opening = TOOL_FORMATS[form].opening
    text = write_call(TOOL_FORMATS[form], *PARIS)
    text = f"{text[:-1]}, time()]" if form == "pythonic" else text + (text if opening else f"; {text}")
    assert len(decoded(parse(form, text))) == 2
    parser = make_parser(form, NAMES, 1, TYPES)
    pieces = [piece for char in text for piece in parser.push(char)] + parser.close()
    assert decoded(collect(pieces)) == [PARIS]


_fragment = st.sampled_from(
    [
        *(form.opening for form in TOOL_FORMATS.values() if form.opening),
        *(
            "</tool_call>",
            "<|python_tag|>",
            "<tool_call|>",
            '<|"|>',
            "[ARGS]",
            "[CALL_ID]",
            "```",
            "call:get{",
            "call:rm{",
        ),
        *("<function=get>", "<function=", "<parameter=code>", "<parameter=list>", "</parameter>", "</function>"),
        *("<arg_key>", "code", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>get\n"),
        *("[", "]", "{", "}", "(", ")", ",", ";", ":", "=", '"', "'", "\\", " ", "\n", "x", "1", "get", "time", "a="),
        *(
            '{"name": "get", "arguments": {',
            '{"name": "rm"',
            '"name"',
            "[get(",
            "get(a=",
            " " * 65,
            '{"a": 1}}',
            "<",
            "é",
        ),
    ]
)


@given(
    st.sampled_from(sorted(TOOL_FORMATS)), st.lists(_fragment, max_size=12), st.lists(st.integers(0, 90), max_size=6)
)
def test_any_text_gives_the_same_pieces_however_it_is_split(form: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found = parse(form, text)
    assert parse(form, *(text[start:end] for start, end in itertools.pairwise(edges))) == found
    if not any(name for name, _ in found):
        assert "".join(part for _, part in found) == text
    if form in ("pythonic", "gemma", "qwen3_coder", "glm4"):  # the arguments of other formats are the model's JSON
        assert all(isinstance(arguments, dict) for name, arguments in decoded(found) if name)


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_a_call_that_is_rendered_as_text_is_parsed(form: str) -> None:
    assert decoded(parse(form, write_call(TOOL_FORMATS[form], *PARIS))) == [PARIS]


A, B = '{"name": "weather", "arguments": {"days": 1}}', '{"arguments": {"days": 2}, "name": "time"}'
UNKNOWN = '{"name": "other", "arguments": {}}'
TWO: Found = [("weather", {"days": 1}), ("time", {"days": 2})]


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        ("hermes", f"<tool_call>{A}\n{B}</tool_call>", TWO),  # several calls between two marks
        ("hermes", f"<tool_call>{A}, {B}\n</tool_call>.", [*TWO, ("", ".")]),
        ("hermes", f"<tool_call>{B}\n{A}</tool_call>", TWO[::-1]),
        ("hermes", f"<tool_call>[{A}, {B}]</tool_call>", TWO),
        ("hermes", f"<tool_call>{A}\n{B}", TWO),
        ("hermes", f"<tool_call>{A[:-1]}</tool_call>.", [TWO[0], ("", ".")]),  # without the last brace
        # A call of an unknown tool is text, unless another call precedes it.
        ("hermes", f"<tool_call>{UNKNOWN}</tool_call>", [("", f"<tool_call>{UNKNOWN}</tool_call>")]),
        ("hermes", f"<tool_call>{A}</tool_call>\n<tool_call>{UNKNOWN}</tool_call>", TWO[:1]),
        ("hermes", f"<tool_call>{A}\n{UNKNOWN}\n{B}</tool_call>", TWO),
        ("mistral_args", '[TOOL_CALLS]weather{"days": 1}[TOOL_CALLS]other{"a": {}}[TOOL_CALLS]time{"days": 2}', TWO),
        ("gemma", "".join(f"<|tool_call>call:{each}{{days:1}}<tool_call|>" for each in ("weather", "other")), TWO[:1]),
    ],
)
def test_further_calls_have_no_markup(form: str, text: str, wanted: Found) -> None:
    for size in (1, 3, 1000):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert decoded(parse(form, *parts)) == wanted


MARKED = ("granite", "hermes", "mistral", "mistral_args", "qwen3")  # JSON formats whose calls have marks


@pytest.mark.parametrize("form", MARKED)
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (A, TWO[:1]),
        (f" \n{A}\n", TWO[:1]),
        ('{"name": "weather", "parameters": {"days": 1}}', TWO[:1]),
        ('{"type": "function", "name": "weather", "arguments": {"days": 1}}', TWO[:1]),
        (B, TWO[1:]),
        (f"{A}\n{B}", TWO),
        (f"{A}, {B}", TWO),
        (f"[{A}, {B}]", TWO),
        # Qwen2.5-Coder writes blocks of code.
        (f"```json\n{json.dumps(json.loads(A), indent=2)}\n```", TWO[:1]),
        (f"```\n{A}\n```\n\n```json\n{B}\n```\n", TWO),
        (f"```json\n[{A}, {B}]\n```", TWO),
        # Answers in JSON, and texts around calls, are text.
        *(
            (text, [("", text)])
            for text in (
                UNKNOWN,
                '{"name": "weather", "arguments": [1]}',
                '{"name": "weather", "arguments": {"days": 1}',
                '{"name": "weather", "days": 1}',
                '{"name": "weather"}',
                '{"name": "weather", "arguments": {}} is the call.',
                f"The call is {A}",
                f"{A}\n{UNKNOWN}",
                f"[{A}, 1]",
                "[1, 2]",
                f"```json\n{A}\n```\nThis calls the tool.",
                f"```python\n{A}\n```",
                "```json\n[1]\n```",
                "```json\n```",
                "```",
                "`x`",
                "{",
                "[",
                "[]",
                "[weather]",
            )
        ),
    ],
)
def test_a_completion_that_is_nothing_but_calls_needs_no_marks(form: str, text: str, wanted: Found) -> None:
    for size in (1, 3, 1000):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert decoded(parse(form, *parts)) == wanted


@pytest.mark.parametrize("form", MARKED)
def test_a_truncated_call_without_marks(form: str) -> None:
    """It is a call as soon as its arguments have begun."""
    text = f"{A}\n{A}"
    begun = A.index("{", 1) + 1
    for cut in range(1, len(text)):
        found = parse(form, text[:cut], is_truncated=True)
        assert cut < begun or parse(form, f"```json\n{text[:cut]}", is_truncated=True) == found
        if cut < begun:
            assert found == [("", text[:cut])]
            continue
        assert all(name == "weather" for name, _ in found)
        assert len(found) == 1 + (cut >= len(A) + 1 + begun)
        assert all('{"days": 1}'.startswith(arguments) for _, arguments in found)


def test_marks_after_text_that_began_as_a_call() -> None:
    marked = f"<tool_call>{A}</tool_call>"
    assert decoded(parse("hermes", f"{A} and {marked}")) == [("", f"{A} and"), *TWO[:1]]
    assert decoded(parse("hermes", *f"{UNKNOWN}\n{marked}")) == [("", UNKNOWN), *TWO[:1]]


def test_json_without_marks_is_text_if_the_request_asks_for_json() -> None:
    for form in MARKED:
        for text, wanted in ((A, [("", A)]), (write_call(TOOL_FORMATS[form], *PARIS), [PARIS])):
            parser = make_parser(form, NAMES, parameter_types=TYPES, expects_json=True)
            assert decoded(collect(parser.push(text) + parser.close())) == wanted


def test_ordinary_json_is_streamed() -> None:
    parser = make_parser("hermes", NAMES)
    assert collect(parser.push('{"name": "Bob')) == [("", '{"name": "Bob')]
    assert collect(parser.push('", "age')) == [("", '", "age')]


def test_every_format_has_a_parser() -> None:
    assert TOOL_PARSERS.keys() == TOOL_FORMATS.keys()


# File, format of tool calls and of reasoning, text before the first call, text after the last one.
FAMILIES = [
    ("qwen3", "qwen3", "qwen3", "<|im_start|>assistant\n", "<|im_end|>"),
    ("qwen2.5", "hermes", None, "<|im_start|>assistant\n", "<|im_end|>"),
    ("granite4", "hermes", None, "assistant<|end_of_role|>", "<|end_of_text|>"),
    ("mistral_nemo", "mistral", None, "[/INST]", "</s>"),
    ("mistral_small_3.2", "mistral_args", None, "[/INST]", "</s>"),
    ("gemma4", "gemma", "gemma", "<|turn>model\n", "<|tool_response>"),
    ("llama3.2_json", "llama3_json", None, "assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    ("qwen3_coder", "qwen3_coder", None, "<|im_start|>assistant\n", "<|im_end|>"),
    ("glm4.5", "glm4", "qwen3", "</think>\n", "<|observation|>"),
]


@pytest.mark.parametrize(("file", "form", "reasoning", "before", "after"), FAMILIES)
def test_calls_that_a_template_renders_are_parsed(
    file: str, form: str, reasoning: str | None, before: str, after: str
) -> None:
    """A template renders earlier calls as its model was trained to write them."""
    source = (TEMPLATES / f"{file}.jinja").read_text()
    chosen, thinking = choose_tool_format("auto", source), choose_reasoning_format("auto", source)
    assert (chosen and chosen.name, thinking and thinking.name) == (form, reasoning)
    wanted = [PARIS, ("time", {})][: 1 if form == "llama3_json" else 2]  # Llama's template renders single calls
    calls = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(wanted)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "x", "content": "42"} for call in calls]
    question: dict[str, Any] = {"role": "user", "content": "?"}
    messages = [question, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    tools = [{"type": "function", "function": {"name": name, "description": "", "parameters": {}}} for name in NAMES]
    text = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, tools, False)
    written = text.rpartition(before)[2].partition(after)[0]
    assert decoded(parse(form, written)) == wanted


def test_formats_of_other_templates() -> None:
    granite = (TEMPLATES / "granite3.3.jinja").read_text()
    assert [
        each and each.name for each in (choose_tool_format("auto", granite), choose_reasoning_format("auto", granite))
    ] == [
        "granite",
        "granite",
    ]
    assert choose_tool_format("auto", "[func_name1(params_name1=params_value1)]") is TOOL_FORMATS["pythonic"]
    assert choose_tool_format("auto", "{{ messages }}") is TOOL_FORMATS["hermes"]
    assert choose_tool_format("none", granite) is None
    assert choose_tool_format("pythonic", granite) is TOOL_FORMATS["pythonic"]
    assert choose_reasoning_format("auto", "{{ messages }}") is None
    assert choose_reasoning_format("none", granite) is None
