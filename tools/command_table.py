"""The description of plain commands, from platform/millrace/cli/plain_commands.toml and docs/management-openapi.yaml.

A plain command is one request. The table names its operation and has its texts and columns; the types of its arguments,
options and columns are those of the document. `tools.build_files` stores the description as JSON, which the command
line reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.generate_client import ClientOperation, operations_of

METHODS = {"show": "get", "remove": "delete", "rename": "update"}  # command -> the client's method, if another
_COMMAND_KEYS = {"arguments", "columns", "done", "empty", "example", "fixed", "help", "json", "operation", "options"}
_COMMAND_KEYS |= {"secret"}
_DONE = {"create": "Created {id}.", "update": "Changed {id}.", "delete": "Deleted {id}.", "remove": "Removed {id}."}
_FORMATS = {"boolean": "yes_no", "array": "join_values"}


class TableError(ValueError):
    """Raised if the table and the document do not fit."""


@dataclass(frozen=True)
class _Field:
    """A field of a request or a response."""

    type: str
    choices: tuple[str | int, ...] = ()
    format: str = ""
    help: str = ""
    is_required: bool = False


class _Document:
    """The operations of the document by the client's names."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.components: dict[str, Any] = schema["components"]["schemas"]
        self._shared = schema["components"].get("parameters", {})
        self._paths = schema["paths"]
        self.operations = {
            f"{resource}.{operation.method}": operation
            for resource, operations in operations_of(schema).items()
            for operation in operations
        }

    def field(self, schema: dict[str, Any], is_required: bool = False) -> _Field:
        """Return a field by its schema."""
        parts = [schema, *schema.get("allOf", ()), *schema.get("oneOf", ())]
        parts += [self.components[part["$ref"].rpartition("/")[2]] for part in parts if "$ref" in part]
        merged: dict[str, Any] = {}
        for part in reversed(parts):
            merged |= part
        types = merged.get("type", "object")
        names = [name for name in (types if isinstance(types, list) else [types]) if name != "null"]
        type_ = names[0] if names else "object"
        items = self.field(merged["items"]) if type_ == "array" and "items" in merged else None
        choices = (
            [choice for choice in merged.get("enum", ()) if choice not in (None, "")]
            if items is None
            else items.choices
        )
        text = str(schema.get("description", "")).split("\n\n")[0]
        return _Field(type_, tuple(choices), str(merged.get("format", "")), text, is_required)

    def find_request_fields(self, operation: ClientOperation) -> dict[str, _Field]:
        """Return the fields of a request by the names of the client's arguments."""
        described = self._paths[operation.path][operation.verb.lower()]
        given = [
            self._shared[each["$ref"].rpartition("/")[2]] if "$ref" in each else each
            for each in described.get("parameters", ())
        ]
        fields = {
            each["name"]: self.field({**each["schema"], "description": each.get("description", "")}) for each in given
        }
        if body := described.get("requestBody", {}).get("content", {}).get("application/json"):
            component = self.components[body["schema"]["$ref"].rpartition("/")[2]]
            required = component.get("required", ())
            fields |= {name: self.field(each, name in required) for name, each in component["properties"].items()}
        names = {name: name for name, _ in operation.path_arguments}
        names |= {argument.name: argument.wire for argument in (*operation.query, *operation.body)}
        return {name: fields[wire] for name, wire in names.items() if name != "page_size"}

    def find_response_fields(self, operation: ClientOperation) -> dict[str, _Field]:
        """Return the fields of the response, or of a list's rows."""
        component = self.components.get(operation.returns.removeprefix("builtins.list[").rstrip("]"), {})
        return {name: self.field(each) for name, each in component.get("properties", {}).items()}


def describe_commands(table: Mapping[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the groups of commands by name, with all that the command line needs.

    Raises:
        TableError: the table names something that the document does not have.
    """
    document = _Document(schema)
    return {name: _group(document, name, group) for name, group in table.items()}


def _group(document: _Document, name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    commands = {key: value for key, value in group.items() if isinstance(value, dict)}
    described = {key: value for key, value in group.items() if key not in ("columns", "resource", *commands)}
    described["commands"] = {}
    for command, given in commands.items():
        try:
            described["commands"][command] = _command(document, name, command, {**group, **given}, given)
        except TableError as exc:
            raise TableError(f"[{name}.{command}] {exc}") from None
    return described


def _command(
    document: _Document, group: str, name: str, inherited: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    if unknown := given.keys() - _COMMAND_KEYS:
        raise TableError(f"unknown: {', '.join(sorted(unknown))}")
    method = METHODS.get(name, name.replace("-", "_"))
    path = given.get("operation") or f"{inherited.get('resource', group.replace('-', '_'))}.{method}"
    operation = document.operations.get(path)
    if operation is None:
        raise TableError(f"the client has no method {path}")
    requested, returned = document.find_request_fields(operation), document.find_response_fields(operation)
    fixed = given.get("fixed", {})
    arguments = _arguments(operation, requested, given.get("arguments", ()))
    positional = {argument["name"] for argument in arguments}
    options = given.get("options")
    if options is None:
        options = {key: {} for key in requested if key not in positional | fixed.keys()}
    if unknown := (options.keys() | fixed.keys()) - requested.keys():
        raise TableError(f"{path} has no parameter {', '.join(sorted(unknown))}")
    columns = inherited.get("columns") or [name.replace("_", " ") + f": {name}" for name in returned]
    is_list = operation.kind in ("page", "list")
    described: dict[str, Any] = {
        "operation": path,
        "path": [key for key, _ in operation.path_arguments],
        "is_page": operation.kind == "page",
        "help": given.get("help") or operation.text.replace("Return ", "Show ", 1),
        "example": " ".join(["millrace", group, name, *given.get("example", "").split()]),
        "arguments": arguments,
        "options": [_option(key, requested[key], option) for key, option in options.items()],
        "fixed": fixed,
        "moments": [key for key in options if operation.verb == "GET" and requested[key].format == "date-time"],
    }
    if is_list or (operation.verb == "GET" and "done" not in given):
        described |= {"is_list": is_list, "columns": [_column(returned, column) for column in columns]}
        described["empty"] = given.get("empty", "Nothing found.")
    else:
        described["times"] = [key for key, field in returned.items() if field.format == "date-time"]
        described["json"] = given.get("json", {})
        described |= {key: given[key] for key in ("secret",) if key in given}
        described["done"] = given.get("done") or _DONE.get(name, "Done.")
        described["is_change"] = operation.verb == "PATCH" and not fixed and len(arguments) == len(described["path"])
    return described


def _arguments(operation: ClientOperation, requested: dict[str, _Field], named: list[str]) -> list[dict[str, Any]]:
    """Return the arguments: those of the path, and the fields that the table names. `name: TITLE` has another title."""
    titles = dict((text.partition(": ")[0], text.partition(": ")[2]) for text in named)
    names = dict.fromkeys([*(name for name, _ in operation.path_arguments), *titles])
    if unknown := names.keys() - requested.keys():
        raise TableError(f"no parameter {', '.join(sorted(unknown))}")
    return [
        {"name": name, "title": titles.get(name, ""), **_describe_type(requested[name], requested[name].choices)}
        for name in names
    ]


def _option(name: str, field: _Field, given: Mapping[str, Any]) -> dict[str, Any]:
    flags, _, metavar = given.get("flags", "").partition(" ")
    choices = given.get("choices", field.choices)
    if set(choices) != set(field.choices):
        raise TableError(f"choices of {name}: {', '.join(map(str, field.choices))}")
    text = given.get("help") or field.help or f"{name.replace('_', ' ').strip().capitalize()}."
    option = {"name": name, "flags": flags or _flags(name, field), "metavar": metavar, "help": text}
    option |= _describe_type(field, choices)
    if "default" in given:
        option["default"] = given["default"]
    elif field.is_required:
        option["is_required"] = True
    return option


def _flags(name: str, field: _Field) -> str:
    flag = name.strip("_").replace("_", "-")
    return f"--{flag}/--no-{flag}" if field.type == "boolean" else f"--{flag}"


def _describe_type(field: _Field, choices: Any) -> dict[str, Any]:
    return {"type": field.type} | ({"choices": list(choices)} if choices else {})


def _column(returned: dict[str, _Field], text: str) -> list[Any]:
    """Return a column's title, field, format and alignment.

    The forms are `field`, `title: field`, `title: field|format` and `title: function()` of the row. A final `>` aligns
    the column right. `field.inner` is in an object, and a text unless it has a format.
    """
    title, _, value = text.rpartition(": ")
    name, _, format_ = value.partition("|")
    title = title or name
    if "()" in name:
        return [title, None, name.partition("()")[0], name.endswith(">")]
    first, _, inner = name.partition(".")
    if first not in returned:
        raise TableError(f"the response has no field {first}")
    field = _Field("string") if inner else returned[name]
    is_right = field.type in ("integer", "number") if not format_ else format_.endswith(">")
    usual = "moment" if field.format == "date-time" else _FORMATS.get(field.type, "text")
    return [title, name, format_.removesuffix(">") or usual, is_right]
