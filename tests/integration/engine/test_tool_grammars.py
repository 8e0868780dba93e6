"""Grammars of each family's tool calls, with marks as tokens and as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.output_formats import MARK_TOKENS, TOOL_FORMATS
from inference_worker.contract.request import RequestRejected, StructuredSpec
from inference_worker.engine.structured_output.grammars import GrammarCompiler
from millrace.gateway.protocols.tools import write_call
from tests.support.engine.tiny_tokenizer import write_tokenizer

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "parameters": WEATHER}, {"name": "get-time", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def grammars(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, sorted(MARK_TOKENS) if request.param else [])
    tokenizer = Tokenizer.from_dir(directory)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    compiler.tokenizer = tokenizer  # type: ignore[attr-defined]
    yield compiler
    compiler.close()


def is_accepted(grammars: GrammarCompiler, form: str, text: str, choice: str = "required", **fields: Any) -> bool:
    """Return whether the complete text matches the grammar of these tools."""
    content = {"tools": TOOLS, "choice": choice, "format": form, **fields}
    matcher = grammars.start("t", StructuredSpec("tools", json.dumps(content), "tools")).matcher
    ids = grammars.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[attr-defined]
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


def joined(form: str, *calls: str) -> str:
    """Return the calls in one completion."""
    style = TOOL_FORMATS[form]
    if style.syntax in ("json_list", "python"):
        bodies = [call.removeprefix(style.opening)[1:-1] for call in calls]
        return f"{style.opening}[{', '.join(bodies)}]"
    return (style.separator if not style.opening else "").join(calls)


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_calls(grammars: GrammarCompiler, form: str) -> None:
    style = TOOL_FORMATS[form]

    def call(name: str, **arguments: Any) -> str:
        return write_call(style, name, arguments).replace("'", '"')

    paris, time = call("weather", city='<"Paris>', days=3), call("get-time")
    if form == "pythonic":
        paris, time = '[weather(city="<\\"Paris>", days=3)]', "[get-time()]"
    assert is_accepted(grammars, form, paris)
    assert is_accepted(grammars, form, call("weather", city="x", metric=True))
    assert is_accepted(grammars, form, paris, "weather")
    assert is_accepted(grammars, form, joined(form, paris, time))
    assert not is_accepted(grammars, form, joined(form, paris, time), parallel=False)
    assert not is_accepted(grammars, form, time, "weather")
    assert not is_accepted(grammars, form, "text")
    wrongs: list[dict[str, Any]] = [{}, {"city": "x", "days": "y"}, {"city": "x", "other": 1}]
    if style.tags is None:  # between tags, 5 is the text of a string
        wrongs.append({"city": 5})
    for wrong in wrongs:
        assert not is_accepted(grammars, form, call("weather", **wrong)), wrong
    assert not is_accepted(grammars, form, call("rm"))
    # With "auto", text may precede the first call. Once a call has begun, it must be valid.
    assert is_accepted(grammars, form, "Only text.", "auto")
    if style.opening:
        assert is_accepted(grammars, form, f"Text. {paris}", "auto")
        assert not is_accepted(grammars, form, f"Text. {call('rm')}", "auto")
    assert is_accepted(grammars, form, '{"a":1}', "auto", answer={"type": "object"})
    assert is_accepted(grammars, form, paris, "auto", answer={"type": "object"})
    assert not is_accepted(grammars, form, "Text.", "auto", answer={"type": "object"})


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_calls_have_the_exact_text_of_their_format(grammars: GrammarCompiler, form: str) -> None:
    """A model does not end its answer after white space that it has never learned."""
    style = TOOL_FORMATS[form]
    one, two = (write_call(style, "weather", {"city": city}).replace("'", '"') for city in ("x", "y"))
    assert is_accepted(grammars, form, one)
    for marked in (style.opening, style.closing, "{", '"weather"', '"name": '):
        for text in (one.replace(marked, f"{marked}  "), one.replace(marked, f"{marked}\n\n")):
            assert text == one or not is_accepted(grammars, form, text), text
    assert not is_accepted(grammars, form, f"{one}\n\n")
    assert not is_accepted(grammars, form, f"{one} ")
    if not style.between:
        assert not is_accepted(grammars, form, f"{one}\n")
        return
    assert is_accepted(grammars, form, f"{one}{style.between}{two}")
    assert not is_accepted(grammars, form, f"{one}\n\n{two}")
    assert not is_accepted(grammars, form, f"{one} {two}")
    assert not is_accepted(grammars, form, f"{one}{style.between}{two}", parallel=False)
    # After the text that is between two calls, the answer may end, too. It ends directly if one call is allowed.
    assert is_accepted(grammars, form, f"{one}{style.between}")
    assert not is_accepted(grammars, form, f"{one}{style.between}", parallel=False)


@pytest.mark.parametrize("form", ["gemma", "glm4", "pythonic", "qwen3_coder"])
def test_schemas_that_a_format_cannot_enforce(grammars: GrammarCompiler, form: str) -> None:
    """A tool that is not strict may then have any arguments. A strict one is rejected."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1}
    text = write_call(TOOL_FORMATS[form], "f", {"b": 1})
    assert is_accepted(grammars, form, text, tools=[{"name": "f", "parameters": schema}])
    with pytest.raises(RequestRejected, match="minProperties is not supported"):
        is_accepted(grammars, form, text, tools=[{"name": "f", "parameters": schema, "strict": True}])


def test_nested_arguments_in_gemmas_format(grammars: GrammarCompiler) -> None:
    kinds = {
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "any": {"description": "anything"},
    }
    tool = {"name": "f", "parameters": {"type": "object", "properties": kinds}}

    def accepts(**arguments: Any) -> bool:
        return is_accepted(grammars, "gemma", write_call(TOOL_FORMATS["gemma"], "f", arguments), tools=[tool])

    assert accepts(tags=["a", "b"], at={"x": 1.5}, any=[{"k": "v"}, None, True])
    assert accepts()
    assert not accepts(tags=["c"])
    assert not accepts(at={})
    assert not accepts(at={"x": "y"})


KINDS = {
    "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    "unit": {"$ref": "#/$defs/Unit"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "any": {"description": "anything"},
    "count": {"type": "integer", "minimum": 3},
    "dotted.name": {"const": "on"},
}
TYPED = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": KINDS,
        "$defs": {"Unit": {"type": "string", "enum": ["m", "km"]}},
        "required": ["unit"],
    },
}


@pytest.mark.parametrize("form", ["qwen3_coder", "glm4"])
def test_values_between_tags(grammars: GrammarCompiler, form: str) -> None:
    """A string has no quotes. Another value is JSON."""

    def accepts(**arguments: Any) -> bool:
        return is_accepted(grammars, form, write_call(TOOL_FORMATS[form], "f", arguments), tools=[TYPED])

    assert accepts(unit="km")
    assert accepts(at={"x": 1.5}, unit="m", note="a\n<b>\n", any=[1, {"k": "v"}], count=3, **{"dotted.name": "on"})
    assert accepts(unit="m", note=None, any="text")
    assert not accepts(unit="mile")
    assert not accepts(at={}, unit="m")
    assert not accepts(at={"x": "y"}, unit="m")
    assert not accepts(unit="m", count=2)
    assert not accepts(unit="m", **{"dotted.name": "off"})
    assert not accepts(at={"x": 1})
