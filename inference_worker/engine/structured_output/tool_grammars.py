"""The grammar of tool calls in each format of `TOOL_FORMATS`. Does not import torch.

Calls have the exact text that the model has learned. After other white space, for example between marks, a model may
repeat the call instead of ending its answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from inference_worker.contract.output_formats import HERMES, MARK_TOKENS, TOOL_FORMATS, CallTags, ToolFormat
from inference_worker.contract.request import RequestRejected
from inference_worker.contract.schema_keywords import resolve, value_types
from inference_worker.contract.schema_loosening import Schema
from inference_worker.engine.structured_output.schemas import enforceable

ANY_OBJECT: Schema = {"type": "object"}
TokenOf = Callable[[str], int | None]  # the id of a mark that is one token; None: the mark is text
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAG_KEY = re.compile(r"[^<>\s]{1,128}")
_MARK = re.compile("(" + "|".join(map(re.escape, sorted(MARK_TOKENS, key=len, reverse=True))) + ")")
_QUOTE = '<|"|>'  # around Gemma's strings
_SPACE = '" "?'
_ANNOTATIONS = frozenset({"type", "description", "title", "default", "examples"})  # they do not constrain a value
_COMMON = r"""
TEXT: /(?s:.*)/
NAME: /[A-Za-z_][A-Za-z0-9_]*/
"""
_ANY_GEMMA_VALUE = r"""
any: string | number | "true" | "false" | "null" | "[" (any ("," any)*)? "]" | any_object
any_object: "{" (NAME ":" any ("," NAME ":" any)*)? "}"
number: %json {"type": "number"}
"""


def tool_grammar(request: dict[str, Any], param: str, any_arguments: Sequence[str], token_of: TokenOf) -> str:
    """Return the grammar text of a request's tool calls.

    Args:
        any_arguments: names of tools whose arguments may be any object.

    Raises:
        RequestRejected: a tool is missing, or its schema cannot be enforced.
    """
    choice, tools = request["choice"], request["tools"]
    named = tools if choice in ("auto", "required") else [tool for tool in tools if tool["name"] == choice]
    if not named:
        raise RequestRejected("invalid_value", f"there is no tool {choice}", param)
    form = TOOL_FORMATS.get(request.get("format", HERMES.name))
    if form is None:
        raise RequestRejected("invalid_value", f"there is no tool format {request['format']!r}", param)
    writer = _ToolRules(form, param, token_of)
    for tool in named:
        writer.add(tool["name"], None if tool["name"] in any_arguments else tool["parameters"])
    return writer.text(choice, request.get("answer"), is_parallel=request.get("parallel", True))


class _ToolRules:
    """The rules of one request's grammar."""

    def __init__(self, form: ToolFormat, param: str, token_of: TokenOf) -> None:
        self._form = form
        self._param = param
        self._token_of = token_of
        self._rules = [_COMMON]
        self._calls: list[str] = []
        if form.syntax == "gemma":
            # A string's text has no special tokens. If the quote is text, the string ends at the first one.
            quote = self._mark(_QUOTE)
            is_token = token_of(_QUOTE) is not None
            self._rules.append(f"string: {quote} TEXT {quote}" if is_token else f"string: {quote} rest")
            if not is_token:
                self._rules.append(f"rest[lazy]: TEXT {quote}")
            self._rules.append(_ANY_GEMMA_VALUE)
        if form.tags is not None:
            # The text of a string, with the tag that ends it. The tag is a token, or else the first one in the text.
            end = form.tags.value[1].strip()
            is_lazy = token_of(end) is None
            self._rules.append(f"text_and_end{'[lazy]' if is_lazy else ''}: TEXT {self._mark(end)}")
            self._rules.append(r'string: text_and_end "\n"')

    def add(self, name: str, schema: Schema | None) -> None:
        """Add the rule of a tool's call. Without a schema, its arguments may be any object."""
        rule = f"tool_{len(self._calls)}"
        self._calls.append(rule)
        literal, syntax = json.dumps(name), self._form.syntax
        if self._form.tags is not None:
            before, after = self._form.tags.name
            arguments = self._tagged_arguments(rule, self._form.tags, schema)
            end = f" {self._make_text_rule(self._form.tags.end)}" if self._form.tags.end else ""
            self._rules.append(f"{rule}: {self._make_text_rule(before + name + after)} {arguments}{end}")
        elif syntax == "python":
            arguments = self._python_arguments(rule, schema)
            self._rules.append(f'{rule}: {literal} "(" {arguments} ")"')
        elif syntax == "gemma":
            arguments = "any_object" if schema is None else self._gemma_object(rule, {**ANY_OBJECT, **schema})
            self._rules.append(f"{rule}: {json.dumps('call:' + name)} {arguments}")
        else:
            checked = enforceable(ANY_OBJECT if schema is None else {**ANY_OBJECT, **schema}, self._param)
            arguments = "%json " + json.dumps(checked)
            if syntax == "named_json":
                self._rules.append(f"{rule}: {literal} {self._mark(self._form.separator)} {arguments}")
            else:
                key = json.dumps(f'"{self._form.arguments_key}"')
                self._rules.append(f'{rule}: {json.dumps(literal)} "," " " {key} ":" " " {arguments}')

    def text(self, choice: str, answer: Schema | None, *, is_parallel: bool) -> str:
        form, rules = self._form, self._rules
        rules.append("named: " + " | ".join(self._calls))
        opening = self._mark(form.opening) if form.opening else ""
        closing = self._mark(form.closing) if form.closing else ""
        padding = json.dumps(form.padding) if form.padding else ""
        call = "named"
        if form.syntax in ("json", "json_list"):
            # Parts as of a schema's JSON, since the grammar library does not split texts that begin alike.
            rules.append(r'object: "{" "\"name\"" ":" " " named "}"')
            call = "object"
        if form.syntax in ("json_list", "python"):
            # Some tokenizers add a space after a mark.
            more = f'(", " {call})*' if is_parallel else ""
            rules.append(f'body: {_SPACE if opening else ""} "[" {call} {more} "]"')
            more = ""
        else:
            rules.append(f"body: {padding} {call} {padding} {closing}")
            more = self._further_calls(opening) if is_parallel else ""
        calls = f"{opening} body {more}"
        if choice != "auto":
            rules.append(f"start: {calls}")
        elif answer is not None:  # an output without calls has its own schema
            rules.append(f"start: answer | {calls}")
            rules.append("answer: %json " + json.dumps(enforceable(answer, self._param)))
        elif not form.opening:
            rules.append("start: TEXT")  # the beginning of a call is also the beginning of a text
        elif self._token_of(form.opening) is not None:
            rules.append(f"start: TEXT | TEXT {calls}")
        else:
            rules += [f"head[lazy]: TEXT {opening}", f"start: TEXT | head body {more}"]
        return "\n".join(rules)

    def _further_calls(self, opening: str) -> str:
        """Return the rule of the text after a call: a mark that follows directly, or the end."""
        form = self._form
        if not form.opening:
            return f"({json.dumps(form.separator)} body)*"
        if not form.between:
            return f"({opening} body)*"
        # After the text between two calls, a model may still end its answer.
        between = f"{json.dumps(form.between)}?"
        return f"({between} {opening} body)* {between}"

    def _mark(self, text: str) -> str:
        token = self._token_of(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def _make_text_rule(self, text: str) -> str:
        """Return the rule of a text in which marks may be tokens."""
        return " ".join(self._mark(part) for part in _MARK.split(text) if part)

    def _python_arguments(self, rule: str, schema: Schema | None) -> str:
        if schema is None or "properties" not in schema:
            return '(NAME "=" %json {} (", " NAME "=" %json {})*)?'
        return self._fields(rule, schema, lambda name: json.dumps(f"{name}="), self._python_value, '", "')

    def _gemma_object(self, rule: str, schema: Schema) -> str:
        if "properties" not in schema:
            self._require_only(schema, "additionalProperties")
            return "any_object"
        fields = self._fields(rule, schema, lambda name: json.dumps(f"{name}:"), self._gemma_value, '","')
        return f'"{{" {fields} "}}"'

    def _fields(
        self,
        rule: str,
        schema: Schema,
        key: Callable[[str], str],
        value: Callable[[str, Schema], str],
        separator: str,
        names_pattern: re.Pattern[str] = _IDENTIFIER,
    ) -> str:
        """Return the rule of an object's properties in their order, without braces."""
        self._require_only(schema, "properties", "required", "additionalProperties", "$defs", "definitions")
        definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = schema.get("required", ())
        names = list(schema["properties"])
        if not set(required) <= set(names):
            raise self._make_rejection("a required property without a schema")
        self._rules.append(f'{rule}_first_{len(names)}: ""\n{rule}_rest_{len(names)}: ""')
        for number, name in enumerate(names):
            if not names_pattern.fullmatch(name):
                raise self._make_rejection(f"the property name {name[:64]!r}")
            found = schema["properties"][name]
            item = value(f"{rule}_{number}", {**found, **definitions} if isinstance(found, dict) else {})
            self._rules.append(f"{rule}_arg_{number}: {key(name)} {item}")
            first, rest = f"{rule}_first_{number + 1}", f"{rule}_rest_{number + 1}"
            with_it = f"{rule}_arg_{number} {rest}"
            skipped = ("", "") if name in required else (f" | {first}", f" | {rest}")
            self._rules.append(f"{rule}_first_{number}: {with_it}{skipped[0]}")
            self._rules.append(f"{rule}_rest_{number}: {separator} {with_it}{skipped[1]}")
        return f"{rule}_first_0"

    def _tagged_arguments(self, rule: str, tags: CallTags, schema: Schema | None) -> str:
        def key(name: str) -> str:
            return self._make_text_rule(tags.key[0] + name + tags.key[1] + tags.value[0])

        if schema is None or "properties" not in schema:
            if schema is not None:
                self._require_only(schema, "additionalProperties")
            before, after = self._make_text_rule(tags.key[0]), self._make_text_rule(tags.key[1] + tags.value[0])
            return f"({before} NAME {after} string)*"
        return self._fields(rule, schema, key, self._tagged_value, "", _TAG_KEY)

    def _tagged_value(self, _: str, schema: Schema) -> str:
        definitions: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        resolved = resolve(schema, definitions)
        found: Schema = {**definitions, **resolved} if isinstance(resolved, dict) else definitions
        types = value_types(found, definitions)
        tags = self._form.tags
        assert tags is not None  # noqa: S101  (checked by the caller)
        end = self._make_text_rule(tags.value[1])
        if types == {"boolean"} and "enum" not in found and "const" not in found:
            return f'("True" | "False" | "true" | "false") {end}'
        if types and "string" not in types:
            return f"%json {json.dumps(enforceable(found, self._param))} {end}"
        choices = found.get("enum", [found["const"]] if "const" in found else None)
        if isinstance(choices, list) and all(isinstance(each, str) for each in choices):
            self._require_only(found, "enum", "const", *definitions)
            return "(" + " | ".join(json.dumps(each) for each in choices) + f") {end}"
        parts = found.get("anyOf", found.get("oneOf", ()))
        for part in parts if isinstance(parts, list) else ():
            self._require_only(part if isinstance(part, dict) else {})
        self._require_only(found, "anyOf", "oneOf", *definitions)
        return "string"

    def _python_value(self, _: str, schema: Schema) -> str:
        if schema.get("type") == "boolean":
            return '("True" | "False" | "true" | "false")'
        return "%json " + json.dumps(enforceable(schema, self._param))

    def _gemma_value(self, rule: str, schema: Schema) -> str:
        kind = schema.get("type")
        if kind == "string" and "enum" in schema and all(isinstance(each, str) for each in schema["enum"]):
            self._require_only(schema, "enum")
            quote = self._mark(_QUOTE)
            return "(" + " | ".join(f"{quote} {json.dumps(each)} {quote}" for each in schema["enum"]) + ")"
        if kind == "string":
            self._require_only(schema)
            return "string"
        if kind in ("integer", "number", "boolean", "null"):
            return "%json " + json.dumps(enforceable(schema, self._param))
        if kind == "array" and isinstance(schema.get("items"), dict):
            self._require_only(schema, "items")
            item = self._gemma_value(f"{rule}_item", schema["items"])
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            return self._gemma_object(rule, schema)
        self._require_only(schema)
        return "any"

    def _require_only(self, schema: Schema, *keywords: str) -> None:
        """Check that a schema has no other keywords that constrain a value.

        Raises:
            RequestRejected: `unsupported_schema` that names the keyword.
        """
        for keyword in schema.keys() - _ANNOTATIONS - set(keywords):
            raise self._make_rejection(keyword)

    def _make_rejection(self, subject: str) -> RequestRejected:
        message = f"{subject} is not supported for calls in the format {self._form.name}"
        return RequestRejected("unsupported_schema", message, self._param)
