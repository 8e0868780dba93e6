"""Plain commands: an operation of a document and its entry in the table become a command."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

from millrace import cli
from millrace.cli import app, plain_commands
from millrace.cli.command_reference import commands_as_markdown
from tools import build_files
from tools.command_table import TableError, describe_commands

WIDGET = {"id": 70_001, "name": "cog", "color": "red", "parts": ["a", "b"], "made_at": "2026-11-01T10:30:00Z"}
TABLE = """
[widgets]
help = "Manage widgets."
before = "policies"

[widgets.list]
example = "--color red"

[widgets.show]
example = "3"
columns = ["id", "made: made_at", "name"]

[widgets.create]
example = "cog --part a"
arguments = ["name"]
options.parts = { flags = "--part PART", help = "A part; repeat." }
options.color = { default = "red" }

[widgets.update]
example = "3 --color green"

[widgets.delete]
example = "3"
done = "Deleted the widget {id}: see `millrace widgets`."
json = { deleted = true }
"""


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation(name: str, text: str, status: str, response: str = "", body: str = "", **fields: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"operationId": name, "description": text, **fields}
    content = {"content": {"application/json": {"schema": _ref(response)}}} if response else {}
    described["responses"] = {status: content}
    if body:
        described["requestBody"] = {"content": {"application/json": {"schema": _ref(body)}}}
    return described


_COLOR = {"in": "query", "name": "color", "schema": _ref("Color"), "description": "Only this color."}
_PATH = {"in": "path", "name": "id", "schema": {"type": "integer"}, "required": True}
DOCUMENT: dict[str, Any] = {
    "paths": {
        "/api/widgets": {
            "get": _operation("widgets", "Return the widgets.", "200", "WidgetList", parameters=[_COLOR]),
            "post": _operation("widget_create", "Create a widget.", "201", "Widget", "WidgetCreate"),
        },
        "/api/widgets/{id}": {
            "get": _operation("widget", "Return a widget.", "200", "Widget", parameters=[_PATH]),
            "patch": _operation(
                "widget_update", "Change a widget.", "200", "Widget", "WidgetChange", parameters=[_PATH]
            ),
            "delete": _operation("widget_delete", "Delete a widget.", "204", parameters=[_PATH]),
        },
    },
    "components": {
        "parameters": {},
        "schemas": {
            "Color": {"type": "string", "enum": ["red", "green"]},
            "Widget": {
                "properties": {
                    "id": {"type": "integer"},
                    "name": {"type": "string"},
                    "color": {"allOf": [_ref("Color")]},
                    "parts": {"type": "array", "items": {"type": "string"}},
                    "made_at": {"type": ["string", "null"], "format": "date-time"},
                }
            },
            "WidgetList": {
                "properties": {"next": {}, "previous": {}, "results": {"type": "array", "items": _ref("Widget")}}
            },
            "WidgetCreate": {
                "properties": {
                    "name": {"type": "string"},
                    "parts": {"type": "array", "items": {"type": "string"}},
                    "color": {"allOf": [_ref("Color")], "description": "Its color."},
                },
                "required": ["name"],
            },
            "WidgetChange": {"properties": {"color": _ref("Color")}},
        },
    },
}


@pytest.fixture
def widgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """The client's resource of the document, whose commands are those of the command line."""
    groups = plain_commands.described_groups() | describe_commands(tomllib.loads(TABLE), DOCUMENT)
    resource = Mock()
    monkeypatch.setattr(plain_commands, "described_groups", lambda: groups)
    monkeypatch.setattr(app, "find_connection", Mock())
    monkeypatch.setattr(app, "make_client", lambda _: SimpleNamespace(widgets=resource))
    yield resource


def _run(*line: str) -> Result:
    result = CliRunner().invoke(cli.root, ["widgets", *line])
    assert result.exit_code in (0, app.USAGE), result.output
    return result


def test_help_and_reference_are_from_the_document_and_the_table(widgets):
    assert "widgets       Manage widgets.\n  policies" in CliRunner().invoke(cli.root, ["--help"]).stdout
    shown = _run("list", "--help").stdout
    for text in ("Show the widgets.", "--color [red|green]", "Only this color.", "--limit", "widgets list --color red"):
        assert text in shown
    create = _run("create", "--help").stdout
    for text in ("Create a widget.", "NAME", "--part PART", "A part; repeat.", "Its color.", "[default: red]"):
        assert text in create
    page = commands_as_markdown()
    assert "### millrace widgets create" in page
    assert "| `--part PART` | A part; repeat. |" in page


def test_columns_are_formatted_by_the_types_of_the_response(widgets):
    widgets.list.return_value = widgets.get.return_value = [WIDGET]
    assert _run().stdout.splitlines() == [
        "   id  name  color  parts  made at         ",
        "70001  cog   red    a, b   2026-11-01 10:30",
    ]
    widgets.get.return_value = WIDGET
    assert _run("show", "3").stdout.split() == ["id", "70001", "made", "2026-11-01", "10:30", "name", "cog"]
    assert json.loads(_run("show", "3", "--json").stdout) == WIDGET
    widgets.get.assert_called_with(3)


def test_arguments_have_the_types_of_the_request(widgets):
    widgets.list.return_value = []
    assert _run("list", "--color", "green").stdout == "Nothing found.\n"
    widgets.list.assert_called_with(color="green")
    widgets.create.return_value = widgets.update.return_value = WIDGET
    assert _run("create", "cog", "--part", "a", "--part", "b").stdout == "Created 70001.\n"
    widgets.create.assert_called_with(name="cog", parts=("a", "b"), color="red")
    widgets.delete.return_value = None
    assert json.loads(_run("delete", "3", "--json").stdout) == {"id": 3, "deleted": True}
    assert "Deleted the widget 3: see `" in _run("delete", "3").stdout
    for line in (("show",), ("show", "x"), ("list", "--color", "blue"), ("list", "--limit", "0"), ("update", "3")):
        assert _run(*line).exit_code == app.USAGE, line
    assert not widgets.update.called


def _change(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets a value of a table."""

    def change(table: dict[str, Any]) -> None:
        *parents, name = path
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = to

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_change("paint", "help", to="Paint."), r"\[widgets.paint\] the client has no method widgets.paint"),
        (_change("list", "columns", to=["size"]), r"\[widgets.list\] the response has no field size"),
        (_change("list", "options", to={"size": {}}), "widgets.list has no parameter size"),
        (_change("create", "arguments", to=["size"]), "no parameter size"),
        (_change("list", "options", to={"color": {"choices": ["red"]}}), "choices of color: red, green"),
        (_change("list", "texts", to=""), "unknown: texts"),
    ],
)
def test_a_table_that_does_not_fit_the_document_is_rejected(change, problem):
    table = copy.deepcopy(tomllib.loads(TABLE))
    change(table["widgets"])
    with pytest.raises(TableError, match=problem):
        describe_commands(table, DOCUMENT)


def test_description_is_built_from_the_table():
    document = build_files.ROOT / "docs" / "management-openapi.yaml"
    assert json.loads(build_files.command_descriptions(document)) == plain_commands.described_groups()
