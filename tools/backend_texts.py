"""The texts that other packages create in English and that the console translates.

They are the messages of rejected actions and of parsers whose errors forms show, the titles and advice of health
issues with the causes of slow replicas, the options that workers refuse, the descriptions of webhook events, the texts
of tenant settings, the reasons why endpoints are disabled and the labels of price components.
Values in them become placeholders: `f"{name} exists"` is `%(name)s exists`.
`tools/build_files.py` writes them to frontend/locale/backend_texts.json.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIRECTORIES = ("tenants", "billing", "platform/millrace/apps", "platform/millrace/environment")
# Where the texts of a call are: positions or names of its arguments.
_ARGUMENTS: dict[str, tuple[int | str, ...]] = {
    "ActionRefused": (0,),
    "Conflict": (0,),
    "FieldRefused": (2,),
    "FileRefused": (1,),
    "NoTaxRule": (0,),
    "HealthIssue": ("title", "todo"),
    "EventType": (1,),
    "SettingGroup": (1,),
    "TenantSetting": ("label", "hint", "choices", "audit_label"),
    "insert": (1,),
    "do_disable_endpoint": ("because",),
}
# Modules whose errors are shown in forms, and where the texts of their exceptions are.
_PARSERS = (
    "billing/rates/price_book.py",
    "billing/rates/price_files.py",
    "tenants/routing_policies/answer_pattern.py",
    "tenants/routing_policies/complexity.py",
    "tenants/routing_policies/conditions.py",
    "tenants/routing_policies/policy.py",
    "platform/millrace/client/testing.py",
)
_COMPONENTS = "billing/rates/pricing.py"
# Refused options, and causes of slow replicas with what to do.
_SUPPORT = "inference_worker/contract/compute_support.py"
_PARSER_ERRORS = dict.fromkeys(("ValueError", "PatternError", "TestCallFailed"), (0,))
# Errors of Python's networks and JSON and of msgspec, which the forms of keys and policies show.
_OF_LIBRARIES = (
    "%(value)s does not appear to be an IPv4 or IPv6 network",
    "Expected `%(expected)s`, got `%(got)s`",
    "Expected `%(expected)s`",
    "Expected `%(expected)s` of length %(condition)s",
    "Expected `%(expected)s` %(condition)s",
    "Object missing required field `%(name)s`",
    "Object contains unknown field `%(name)s`",
    "Invalid enum value %(value)s",
    "Invalid value %(value)s",
    "Expecting value",
    "Expecting property name enclosed in double quotes",
    "Expecting ',' delimiter",
    "Expecting ':' delimiter",
    "Extra data",
    "Unterminated string starting at",
    "Invalid control character at",
)
_POSITION = re.compile(r" - at `.*`$")  # place of an error in a policy, which the console shows in its own way
# Functions that return texts, by the modules they are in.
_RETURNED = {
    "bank_files.py": "describe_problem",
    "deployments.py": "check_workers",
    "processes.py": "describe",
    "target_checks.py": "message",
    "tenant_settings.py": "problem",
}
_MAX_ALTERNATIVES = 12
_PLACEHOLDER = re.compile(r"%\((\w+)\)s")
_Scope = ast.Module | ast.FunctionDef


def modules() -> list[Path]:
    """Return the modules with texts."""
    found = [path for directory in DIRECTORIES for path in sorted((ROOT / directory).rglob("*.py"))]
    others = [ROOT / name for name in (*_PARSERS, _SUPPORT)]
    return [path for path in dict.fromkeys([*found, *others]) if "migrations" not in path.parts]


def backend_texts() -> list[str]:
    """Return the texts of all modules, each once, in the order of the modules."""
    sources = {path: path.read_text(encoding="utf-8") for path in modules()}
    found: dict[str, None] = {}
    for path, source in sources.items():
        if path.is_relative_to(ROOT / "platform" / "millrace" / "client") or path == ROOT / _SUPPORT:
            continue
        found |= dict.fromkeys(texts_of(source, _RETURNED.get(path.name)))
    for name in _PARSERS:
        texts = texts_of(sources[ROOT / name], arguments=_PARSER_ERRORS)
        found |= dict.fromkeys(text for text in (_POSITION.sub("", text) for text in texts) if _has_words(text))
    support = sources[ROOT / _SUPPORT]
    refusals = texts_of(support, arguments={"RefusedOption": (1,)})
    others = (*labels_of(sources[ROOT / _COMPONENTS]), *refusals, *causes_of(support), *_OF_LIBRARIES)
    return list(found | dict.fromkeys(others))


def labels_of(source: str) -> list[str]:
    """Return the labels of the price components: the second and third string of each member of `Component`."""
    (components,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Component"
    )
    return [
        text
        for member in components.body
        if isinstance(member, ast.Assign)
        for text in re.findall(r"'([^']*)'", ast.unparse(member.value))[1:3]
    ]


def causes_of(source: str) -> list[str]:
    """Return the causes of slow replicas and what to do: the strings of the table `_TEXTS`."""
    (table,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_TEXTS"
    )
    return [each.value for each in ast.walk(table) if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def texts_of(
    source: str, returned_by: str | None = None, arguments: Mapping[str, tuple[int | str, ...]] = _ARGUMENTS
) -> list[str]:
    """Return the texts of a module in calls with these `arguments`, and those that the function `returned_by` returns.

    A text without a word of its own, such as `%(error)s.`, is left out.
    """
    module = ast.parse(source)
    found: list[str] = []
    scopes: list[_Scope] = [module, *(node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))]
    for scope in scopes:
        reader = _Reader(module, scope)
        for node in _own_nodes(scope):
            if isinstance(node, ast.Call):
                found += [text for argument in _arguments(node, arguments) for text in reader.texts(argument)]
            elif isinstance(node, ast.Return) and isinstance(scope, ast.FunctionDef) and scope.name == returned_by:
                found += reader.texts(node.value)
    return [text for text in found if _has_words(text)]


def _has_words(text: str) -> bool:
    return re.search(r"[A-Za-z]{3}", _PLACEHOLDER.sub("", text)) is not None


def _own_nodes(scope: _Scope) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those of the functions in it."""
    waiting: list[ast.AST] = list(scope.body)
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, ast.FunctionDef):
            yield node
            waiting += ast.iter_child_nodes(node)


def _arguments(call: ast.Call, wanted: Mapping[str, tuple[int | str, ...]]) -> Iterator[ast.expr]:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    for place in wanted.get(name, ()):
        if isinstance(place, int):
            yield from call.args[place : place + 1]
        else:
            yield from (keyword.value for keyword in call.keywords if keyword.arg == place)


class _Reader:
    """The texts of expressions in one function, whose names are resolved."""

    def __init__(self, module: ast.Module, scope: _Scope) -> None:
        self.functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        self.module = module
        self.values: dict[str, list[ast.expr]] = {}
        for node in [*_own_nodes(module), *(_own_nodes(scope) if scope is not module else ())]:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and isinstance(targets[0], ast.Name):
                self.values.setdefault(targets[0].id, []).append(node.value)

    def texts(self, node: ast.expr | None) -> list[str]:
        """Return the texts that an expression can have; none if it is not known."""
        if isinstance(node, ast.Constant):
            return [node.value.replace("%", "%%")] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return self._join(node)
        if isinstance(node, ast.IfExp):
            return self.texts(node.body) + self.texts(node.orelse)
        if isinstance(node, ast.BoolOp):
            return [text for value in node.values for text in self.texts(value)]
        if isinstance(node, ast.Subscript):
            return self.texts(node.value)
        if isinstance(node, ast.Dict):
            return [text for value in node.values for text in self.texts(value)]
        if isinstance(node, ast.Name):
            return [text for value in self.values.get(node.id, ()) for text in self.texts(value)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            function = self.functions[node.func.id]
            inner = _Reader(self.module, function)
            returned = [part.value for part in _own_nodes(function) if isinstance(part, ast.Return)]
            return [text for value in returned for text in inner.texts(value)]
        return []

    def _join(self, node: ast.JoinedStr) -> list[str]:
        parts: list[list[str]] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                is_plain = part.format_spec is None and part.conversion == -1
                known = self.texts(part.value) if is_plain else []
                parts.append(known if any(known) else [_placeholder(part.value)])
            else:
                parts.append(self.texts(part))
        return [
            _number_placeholders("".join(chosen))
            for chosen in itertools.islice(itertools.product(*parts), _MAX_ALTERNATIVES)
        ]


def _placeholder(value: ast.expr) -> str:
    words = re.sub(r"\W+|_+", "_", ast.unparse(value)).strip("_").lower()
    return f"%({words or 'value'})s"


def _number_placeholders(text: str) -> str:
    """Return the text with a different name for each placeholder."""
    seen: dict[str, int] = {}

    def name(match: re.Match[str]) -> str:
        seen[match.group(1)] = number = seen.get(match.group(1), 0) + 1
        return match.group() if number == 1 else f"%({match.group(1)}_{number})s"

    return _PLACEHOLDER.sub(name, text)
