"""The modules of `millrace.client` that are generated from docs/management-openapi.yaml.

`tools.build_files` writes them.
"""

from __future__ import annotations

import keyword
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

LEFT_OUT = {"payment_webhook"}  # called by payment providers
CLIENT_PARAMETERS = {"cursor", "tenant"}  # set by the pager, and by the client
SINGLETONS = {path: path.replace("/", "_") for path in ("billing/currency", "billing/profile")}  # one resource each
METHODS = {  # operation -> method, where the path does not give a good name
    "invitation_revoke": "revoke",
    "key_revoke": "revoke",
    "invoice_pay": "pay",
    "operator_deployment_draft_price": "draft_price",
    "operator_costs_import": "import_file",
    "operator_deployments_import": "import_list",
    "operator_execution_costs": "executions",
    "operator_invoice_credit": "create_credit_note",
    "operator_invoice_debit": "create_debit_note",
    "operator_bank_entry_assign": "assign",
    "operator_bank_entry_dismiss": "dismiss",
    "operator_payment_event_dismiss": "dismiss",
    "operator_payments_import": "import_file",
    "operator_exchange_rates_import": "import_file",
    "operator_prices_import": "import_file",
    "operator_prices_propose": "propose",
    "operator_provider_exports": "compare",
    "operator_commitment_end": "end",
    "operator_tenant_commitment": "add_commitment",
    "operator_tenant_commitments": "commitments",
    "operator_tenant_credit": "grant_credit",
    "operator_tenant_draft": "draft_invoices",
    "operator_tenant_entity": "set_entity",
    "operator_reratings_propose": "propose",
    "operator_tenant_one_off_line": "add_one_off_line",
    "operator_tenant_one_off_lines": "one_off_lines",
    "operator_one_off_line_end": "end",
    "operator_price_term_end": "end",
    "operator_metered_usage_reverse": "reverse",
    "operator_tenant_metered_usage": "record_metered_usage",
    "operator_tenant_metered_usages": "metered_usage",
    "operator_tenant_payment": "record_payment",
    "billing_statement_csv": "statement_csv",
    "billing_statement_pdf": "statement_pdf",
    "operator_tenant_statement_csv": "statement_csv",
    "operator_tenant_statement_pdf": "statement_pdf",
    "operator_tenant_prepaid": "set_prepaid",
    "operator_tenant_price_term": "add_price_term",
    "operator_tenant_price_terms": "price_terms",
    "policies_publish": "publish",
    "policy_withdraw": "withdraw",
    "policy_draft_discard": "discard",
    "policy_drafts_save": "save",
    "top_up": "top_up",
}
_HEADER = (
    '"""{title} Generated from docs/management-openapi.yaml: do not edit."""\n\nfrom __future__ import annotations\n'
)
_JSON_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}


@dataclass(frozen=True)
class Argument:
    """A keyword argument of a method. `wire` is its name in the query or the body."""

    name: str
    wire: str
    type: str
    required: bool
    help: str


@dataclass
class ClientOperation:
    """A method of a resource."""

    method: str
    verb: str
    path: str
    text: str
    returns: str
    kind: str  # json, page, none, bytes or text
    path_arguments: list[tuple[str, str]] = field(default_factory=list)
    query: list[Argument] = field(default_factory=list)
    body: list[Argument] = field(default_factory=list)
    idempotent: bool = False


class Types:
    """Python types of JSON schemas."""

    def __init__(self, components: dict[str, Any]) -> None:
        self.components = components

    def of(self, schema: dict[str, Any], *, argument: bool = False) -> str:
        """Return the annotation of a schema. Arguments accept more types than responses have."""
        if ref := schema.get("$ref"):
            return str(ref.rpartition("/")[2])
        if variants := schema.get("allOf") or schema.get("oneOf"):
            return self._union(self.of(variant, argument=argument) for variant in variants)
        if "const" in schema:
            return f"Literal[{schema['const']!r}]"
        if "enum" in schema:
            return f"Literal[{', '.join(map(repr, schema['enum']))}]"
        given = schema.get("type")
        if given is None:
            return "Any"
        return self._union(
            self._of_type(name, schema, argument) for name in (given if isinstance(given, list) else [given])
        )

    def _of_type(self, name: str, schema: dict[str, Any], argument: bool) -> str:
        if name == "array":
            items = self.of(schema["items"], argument=argument) if "items" in schema else "Any"
            return f"{'Sequence' if argument else 'builtins.list'}[{items}]"
        if name == "object":
            values = schema.get("additionalProperties")
            typed = self.of(values, argument=argument) if isinstance(values, dict) and values else "Any"
            return f"{'Mapping' if argument else 'dict'}[str, {typed}]"
        if name == "string" and schema.get("format") in ("date-time", "date") and argument:
            return f"str | {'datetime' if schema['format'] == 'date-time' else 'date'}"
        if name == "string" and schema.get("maxLength") == 0:
            return "str"
        return _JSON_TYPES[name]

    def _union(self, types: Iterator[str]) -> str:
        return " | ".join(dict.fromkeys(part for typed in types for part in _parts(typed)))


def _parts(typed: str) -> list[str]:
    return typed.split(" | ") if "[" not in typed else [typed]


def models(schema: dict[str, Any], used: set[str]) -> str:
    """Return the module of the responses' types."""
    types = Types(schema["components"]["schemas"])
    lines = [_HEADER.format(title="Types of the management API's objects.")]
    lines.append("from typing import Any, Literal, NotRequired, TypedDict\n")
    names = sorted(used, key=lambda name: (0 if "enum" in types.components[name] else 1, name))
    for name in names:
        component = types.components[name]
        if "enum" in component:
            lines.append(f"{name} = Literal[{', '.join(map(repr, component['enum']))}]")
            continue
        required = set(component.get("required", ()))
        fields = {}
        for key, value in component["properties"].items():
            typed = types.of(value).replace("builtins.list", "list")
            fields[key] = typed if key in required else f"NotRequired[{typed}]"
        lines += ["", "", *_typed_dict(name, component, fields)]
    return "\n".join(lines) + "\n"


def _typed_dict(name: str, component: dict[str, Any], fields: dict[str, str]) -> list[str]:
    if any(map(keyword.iskeyword, fields)):  # only this form can name them; it evaluates the types
        pairs = ", ".join(f'"{key}": "{typed}"' for key, typed in fields.items())
        return [f'{name} = TypedDict("{name}", {{{pairs},}})']
    helps = {key: str(value.get("description", "")) for key, value in component["properties"].items()}
    lines = [f"class {name}(TypedDict):"]
    text = component.get("description", "").split("\n\n")[0]
    if text:
        lines.append(f'    """{_wrap(text, 4)}"""\n')
    for key, typed in fields.items():
        note = f"  # {helps[key]}" if helps[key] else ""
        line = f"    {key}: {typed}"
        lines.append(line + note if len(line + note) <= 120 else line)
    return lines


def used_components(schema: dict[str, Any], operations: list[ClientOperation]) -> set[str]:
    """Return the components that the operations' types name, directly or through others."""
    components = schema["components"]["schemas"]
    texts = [op.returns for op in operations]
    texts += [argument.type for op in operations for argument in (*op.query, *op.body)]
    found: set[str] = set()
    pending = {word for text in texts for word in re.findall(r"\w+", text) if word in components}
    while pending:
        name = pending.pop()
        found.add(name)
        refs = re.findall(r"schemas/(\w+)", str(components[name]))
        pending |= set(refs) - found
    return found


def operations_of(schema: dict[str, Any]) -> dict[str, list[ClientOperation]]:
    """Return the operations of each resource. Names of operators' resources start with `operator.`."""
    found: dict[str, list[ClientOperation]] = defaultdict(list)
    types = Types(schema["components"]["schemas"])
    shared = schema["components"]["parameters"]
    for path, verbs in schema["paths"].items():
        for verb, described in verbs.items():
            if described["operationId"] not in LEFT_OUT:
                resource, operation = _operation(types, shared, path, verb.upper(), described)
                found[resource].append(operation)
    return dict(sorted(found.items()))


def _operation(
    types: Types, shared: dict[str, Any], path: str, verb: str, described: dict[str, Any]
) -> tuple[str, ClientOperation]:
    status, response = next(iter(described["responses"].items()))
    kind, returns = _returns(types, response)
    short = path.removeprefix("/api/")
    area = "operator." if short.startswith("operator/") else ""
    short = short.removeprefix("operator/")
    for segments, name in SINGLETONS.items():
        short = short.replace(segments, name)
    resource, *rest = short.split("/")
    name = described["operationId"]
    method = METHODS.get(name) or _method(verb, rest, status, kind)
    operation = ClientOperation(method, verb, path, _text(described["description"]), returns, kind)
    for given in described.get("parameters", []):
        parameter = shared[given["$ref"].rpartition("/")[2]] if "$ref" in given else given
        place, typed = parameter["in"], types.of(parameter["schema"], argument=True)
        if place == "path":
            operation.path_arguments.append((parameter["name"], typed))
        elif place == "header":
            operation.idempotent = True
        elif not _is_set_by_client(parameter) and (parameter["name"] != "limit" or kind == "page"):
            operation.query.append(_argument(parameter["name"], typed, False, parameter.get("description", "")))
    body = described.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        component = types.components[body["schema"]["$ref"].rpartition("/")[2]]
        required = component.get("required", ())
        for key, value in component["properties"].items():
            typed = types.of(value, argument=True)
            operation.body.append(_argument(key, typed, key in required, value.get("description", "")))
    return area + resource.replace("-", "_"), operation


def _is_set_by_client(parameter: dict[str, Any]) -> bool:
    """Return whether a query parameter is no argument. The client reads JSON where `format` has it."""
    is_format_of_json = parameter["name"] == "format" and "json" in parameter["schema"].get("enum", ())
    return parameter["name"] in CLIENT_PARAMETERS or is_format_of_json


def _argument(wire: str, typed: str, required: bool, text: str) -> Argument:
    name = "page_size" if wire == "limit" else wire
    name = f"{name}_" if keyword.iskeyword(name) else name
    return Argument(name, wire, typed, required, text.split("\n\n")[0])


def _method(verb: str, rest: list[str], status: str, kind: str) -> str:
    name = rest[-1].replace("-", "_") if rest and not rest[-1].startswith("{") else ""
    if name:
        return name if verb in ("GET", "POST") else f"set_{name}"
    if verb == "GET":
        return "get" if rest or kind not in ("page", "list") else "list"
    if verb == "POST":
        return "create" if status == "201" else "set"
    return {"PATCH": "update", "DELETE": "delete", "PUT": "set"}[verb]


def _returns(types: Types, response: dict[str, Any]) -> tuple[str, str]:
    """Return the kind of a response and its type."""
    content = response.get("content", {})
    if not content:
        return "none", "None"
    media, first = next(iter(content.items()))
    if media != "application/json":
        return ("text", "str") if media.startswith("text/") else ("bytes", "bytes")
    schema = first["schema"]
    component = types.components.get(schema.get("$ref", "").rpartition("/")[2], {})
    if set(component.get("properties", ())) == {"next", "previous", "results"}:
        return "page", types.of(component["properties"]["results"]["items"])
    return ("list" if schema.get("type") == "array" else "json"), types.of(schema)


def _text(text: str) -> str:
    text = " ".join(text.split("\n\n")[0].split())
    return text.replace(" CSV with `format=csv`.", "").replace("List inference", "Return inference")


def _wrap(text: str, indent: int) -> str:
    text = " ".join(text.split())
    return textwrap.fill(text, 116 - indent, subsequent_indent=" " * indent, break_long_words=False)


def resources(operations: dict[str, list[ClientOperation]], *, is_async: bool) -> str:
    """Return the module of the resources of one client."""
    kind = "asynchronous" if is_async else "synchronous"
    prefix = "Async" if is_async else ""
    lines = [_HEADER.format(title=f"Resources of the {kind} client.")]
    lines.append(
        "import builtins\nfrom collections.abc import Mapping, Sequence\nfrom datetime import date, datetime\n"
        "from typing import Any, Literal, cast\nfrom urllib.parse import quote\n\n"
        f"from millrace.client.http import OMIT, {prefix}Http, Omit\n"
        "from millrace.client.models import (\n    @MODELS@\n)\n"
        f"from millrace.client.pages import {prefix}Pager\n"
    )
    groups: dict[str, list[str]] = {"": [], "operator.": []}
    for resource, found in operations.items():
        area = "operator." if resource.startswith("operator.") else ""
        name = resource.removeprefix(area)
        groups[area].append(name)
        lines += _resource(_class_of(resource, prefix), found, prefix)
    lines += _group(f"{prefix}OperatorResources", "Resources of operators.", "operator.", groups["operator."], prefix)
    lines += _group(f"{prefix}Resources", "Resources of a client.", "", groups[""], prefix)
    return _with_imports("\n".join(lines) + "\n", operations)


def _with_imports(module: str, operations: dict[str, list[ClientOperation]]) -> str:
    """Return the module with the imports of what it uses."""
    head, _, rest = module.partition("@MODELS@")
    flat = [operation for found in operations.values() for operation in found]
    types = [op.returns for op in flat] + [argument.type for op in flat for argument in (*op.query, *op.body)]
    words = {word for text in types for word in re.findall(r"\b[A-Z]\w+", re.sub(r"Literal\[[^]]*\]", "", text))}
    words -= {"Any", "Literal", "Mapping", "None", "Sequence"}
    body = rest
    for name in ("Mapping", "Sequence", "date", "Literal"):
        if not re.search(rf"\b{name}\b", body):
            head = re.sub(rf"(import .*?)\b{name}, ", r"\1", head)
    return head + ",\n    ".join(sorted(words)) + "," + rest


def _class_of(resource: str, prefix: str) -> str:
    return prefix + "".join(word.title() for word in re.split(r"[._]", resource)) + "Resource"


def _group(name: str, text: str, area: str, members: list[str], prefix: str) -> list[str]:
    lines = ["", "", f"class {name}:", f'    """{text}"""', "", f"    def __init__(self, http: {prefix}Http) -> None:"]
    lines += [f"        self.{member} = {_class_of(area + member, prefix)}(http)" for member in members]
    if not area:
        lines.append(f"        self.operator = {prefix}OperatorResources(http)")
    return lines


def _resource(name: str, operations: list[ClientOperation], prefix: str) -> list[str]:
    lines = ["", "", f"class {name}:"]
    lines += [f"    def __init__(self, http: {prefix}Http) -> None:", "        self._http = http"]
    for operation in operations:
        lines += ["", *_method_source(operation, prefix)]
    return lines


def _method_source(op: ClientOperation, prefix: str) -> list[str]:
    is_pager = op.kind == "page"
    arguments = ["self", *(f"{name}: {typed}" for name, typed in op.path_arguments)]
    named = sorted((*op.body, *op.query), key=lambda argument: not argument.required)
    keywords = [f"{a.name}: {a.type}" if a.required else f"{a.name}: {_optional(a.type)} = OMIT" for a in named]
    if op.idempotent:
        keywords.append("idempotency_key: str | None = None")
    if keywords:
        arguments += ["*", *keywords]
    returns = f"{prefix}Pager[{op.returns}]" if is_pager else op.returns
    awaited = "async " if prefix and not is_pager else ""
    signature = _wrapped_call(f"    {awaited}def {op.method}(", arguments, f") -> {returns}:")
    return [*signature, *_docstring(op, named), *_call(op, returns, prefix, is_pager)]


def _wrapped_call(start: str, arguments: list[str], end: str) -> list[str]:
    """Return a call or signature on one line if it fits, else with a line for each argument."""
    line = f"{start}{', '.join(arguments)}{end}"
    if len(line) <= 120:
        return [line]
    indent = " " * (len(start) - len(start.lstrip()))
    return [start, *(f"{indent}    {argument}," for argument in arguments), f"{indent}{end}"]


def _optional(typed: str) -> str:
    return f"{typed.removesuffix(' | None')} | Omit" + (" | None" if typed.endswith(" | None") else "")


def _docstring(op: ClientOperation, named: list[Argument]) -> list[str]:
    helps = [(a.name, " ".join(a.help.split()).rstrip(".")) for a in named if a.help]
    if not helps:
        return [f'        """{_wrap(op.text, 8)}"""']
    lines = [f'        """{_wrap(op.text, 8)}', "", "        Args:"]
    for name, text in helps:
        wrapped = textwrap.fill(f"{name}: {text}.", 104, subsequent_indent=" " * 16)
        lines.append(f"            {wrapped}")
    return [*lines, '        """']


def _call(op: ClientOperation, returns: str, prefix: str, is_pager: bool) -> list[str]:
    path = op.path.removeprefix("/api/")
    for name, typed in op.path_arguments:
        if typed == "str":
            path = path.replace(f"{{{name}}}", f"{{quote({name}, safe='')}}")
    given = [f'"{op.verb}"', f'f"{path}"' if "{" in path else f'"{path}"']
    for place, arguments in (("query", op.query), ("body", op.body)):
        if arguments:
            pairs = ", ".join(f'"{a.wire}": {a.name}' for a in arguments)
            given.append(f"{place}={{{pairs}}}")
    if is_pager:
        return _wrapped_call(f"        return {prefix}Pager[{op.returns}](", ["self._http", *given[1:]], ")")
    if op.idempotent:
        given.append("idempotency_key=idempotency_key")
    function = "raw" if op.kind in ("bytes", "text") else "call"
    call = f"{'await ' if prefix else ''}self._http.{function}("
    if op.kind == "none":
        return _wrapped_call(f"        {call}", given, ")")
    if op.kind in ("bytes", "text"):
        return _wrapped_call(f"        return ({call}", given, f")).{'content' if op.kind == 'bytes' else 'text'}")
    return _wrapped_call(f'        return cast("{returns}", {call}', given, "))")


def generate(schema: dict[str, Any]) -> dict[str, str]:
    """Return the modules by file name."""
    operations = operations_of(schema)
    flat = [operation for found in operations.values() for operation in found]
    return {
        "models.py": models(schema, used_components(schema, flat)),
        "resources.py": resources(operations, is_async=False),
        "async_resources.py": resources(operations, is_async=True),
    }
