"""Plain commands, which are one request: list, show, create, update, delete and the like.

`plain_commands.toml` declares them. `tools.build_files` adds the types of the management API and stores the result as
JSON, so that the command line parses neither at its start.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import click

from inference_worker.contract.command_line import format_quoted_commands
from millrace.cli import output, row_texts
from millrace.cli.app import Command, ResourceGroup, Session, api_command, given_options
from millrace.cli.output import Column

DESCRIPTION = Path(__file__).with_suffix(".json")
_TYPES: dict[str, Any] = {"integer": click.INT, "number": click.FLOAT}


@functools.cache
def described_groups() -> dict[str, Any]:
    """Return the description of all groups with plain commands."""
    groups: dict[str, Any] = json.loads(DESCRIPTION.read_bytes())
    return groups


def add_plain_commands(name: str, found: click.Command | None) -> click.Command | None:
    """Return a command of the command line with its plain commands; None if there is no such command.

    Args:
        name: its name.
        found: the command that is written by hand; None if there is none.
    """
    described = described_groups().get(name)
    if described is None:
        return found
    group = found or ResourceGroup(name, help=described["help"], default=described.get("default", "list"))
    assert isinstance(group, click.Group)  # noqa: S101  (the table has no other)
    for command, fields in described["commands"].items():
        if command not in group.commands:
            group.add_command(_make_command(command, fields))
    order = described.get("order", "").split()
    names = sorted(group.commands, key=lambda command: order.index(command) if command in order else len(order))
    group.commands = {command: group.commands[command] for command in names}  # the order of the examples
    return group


def columns_of(group: str, command: str) -> list[Column]:
    """Return the columns of a plain command, for others that print the same object."""
    return [_column(*column) for column in described_groups()[group]["commands"][command]["columns"]]


def instant(value: str | None) -> str | None:
    """Return a time for the API, which requires a time of day."""
    return f"{value}T00:00:00" if value and "T" not in value and " " not in value else value


def _make_command(name: str, described: Mapping[str, Any]) -> click.Command:
    def run(session: Session, **given: Any) -> None:
        _run(session, described, given)

    decorated: Command = run
    for option in reversed(described["options"]):
        decorated = _option(option)(decorated)
    for argument in reversed(described["arguments"]):
        metavar = argument["title"] or None
        decorated = click.argument(argument["name"], type=_type(argument), metavar=metavar)(decorated)
    made = api_command(name, decorated, example=described["example"], rows=described["is_page"])
    made.help = described["help"]
    return made


def _option(described: Mapping[str, Any]) -> Any:
    fields: dict[str, Any] = {"help": described["help"], "metavar": described["metavar"] or None}
    if described["type"] == "boolean":
        return click.option(described["flags"], described["name"], default=None, help=described["help"], is_flag=True)
    if "default" in described:
        fields |= {"default": described["default"], "show_default": True}
    fields |= {"multiple": described["type"] == "array", "required": described.get("is_required", False)}
    return click.option(described["flags"], described["name"], type=_type(described), **fields)


def _type(described: Mapping[str, Any]) -> Any:
    choices = described.get("choices")
    return click.Choice(choices) if choices else _TYPES.get(described["type"], click.STRING)


def _run(session: Session, described: Mapping[str, Any], given: dict[str, Any]) -> None:
    """Send the request and print its result."""
    limit = given.pop("limit", None)
    values = given_options(given)
    values |= {name: instant(values[name]) for name in described["moments"] if name in values}
    path = {name: values.pop(name) for name in described["path"]}
    if described.get("is_change") and not values:
        raise click.UsageError("Give at least one option to change.")
    result = attrgetter(described["operation"])(session.client)(*path.values(), **values, **described["fixed"])
    if "columns" not in described:
        _print_change(session, described, path | given, result)
        return
    columns = [_column(*column) for column in described["columns"]]
    if described["is_list"]:
        session.rows(result, columns, limit=limit, empty=format_quoted_commands(described["empty"]))
    else:
        session.one(result, columns)


def _print_change(session: Session, described: Mapping[str, Any], given: Mapping[str, Any], result: Any) -> None:
    printed = {name: given[name] for name in described["path"]} | described["json"] if result is None else result
    texts = {**given, **printed}
    texts |= {name: output.moment(texts[name]) for name in described["times"] if texts.get(name)}
    if "secret" in described and not session.as_json:
        click.echo(described["secret"].format_map(texts), err=True)
        click.echo(printed["secret"])
        return
    session.done(printed, format_quoted_commands(described["done"]).format_map(texts))


def _column(title: str, name: str | None, text: str, is_right: bool) -> Column:
    if name is None:
        return Column(title, getattr(row_texts, text), right=is_right)
    return Column(
        title, name, str if text == "text" else getattr(row_texts, text, None) or getattr(output, text), is_right
    )
