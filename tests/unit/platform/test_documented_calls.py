"""Examples of the management API in the documentation can be run with an API key, or state that they need a session."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.urls import Resolver404, resolve

from millrace.cli.plain_commands import described_groups
from tenants.authentication import ApiKeyAuthentication
from tenants.permissions import KEY_SCOPES
from tests.support.code_blocks import ROOT, CodeBlock, blocks_of
from tools.generate_client import operations_of
from tools.openapi.formatting import read_yaml
from tools.openapi.management import DOCUMENT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
]
_CURL = re.compile(r"\bcurl\b[^\n]*")
_URL = re.compile(r"/api/[\w./${}-]*")
_METHOD = re.compile(r"-X\s*([A-Z]+)")
_DATA = re.compile(r"\s(?:-d|--data\S*|--json|-F)\b")
_HELPER = re.compile(r"\b(?:call|post|get)\(?\s*f?[\"']?(/api/(?:\{[^}]*\}|[^\"'\s,){])+)")
_CLIENT = re.compile(r"\bclient\.((?:\w+\.)+\w+)\(")
KEY_PERMISSIONS = frozenset().union(*KEY_SCOPES.values())  # of the scopes together
_METHODS = ("GET", "POST", "PATCH", "PUT", "DELETE")
OPERATIONS = {
    f"{resource}.{operation.method}": operation
    for resource, operations in operations_of(read_yaml(DOCUMENT.read_text(encoding="utf-8"))).items()
    for operation in operations
}


def problem_of(path: str, methods: tuple[str, ...]) -> str | None:
    """Return why no API key can call a path with any of these methods, else None."""
    plain = re.sub(r"\$\{?\w+\}?|\{[^}]*\}", "1", path.partition("?")[0]).rstrip("/")
    try:
        view: Any = resolve(plain).func.cls  # type: ignore[attr-defined]
    except Resolver404:
        return f"{plain} does not exist"
    if ApiKeyAuthentication not in view.authentication_classes:
        return f"{plain} accepts no API key"
    allowed = [method for method in methods if hasattr(view, method.lower())]
    needed = {view.permissions.get(method) for method in allowed}
    if not allowed or not any(permission is None or permission in KEY_PERMISSIONS for permission in needed):
        return f"{methods} {plain} needs {[str(permission) for permission in needed]}, which no key has"
    return None


def calls_of(block: CodeBlock) -> list[tuple[str, tuple[str, ...]]]:
    """Return the paths of a block's calls of the management API, with the methods that each may have."""
    code = block.code.replace("\\\n", " ")
    calls: list[tuple[str, tuple[str, ...]]] = []
    for command in _CURL.findall(code):
        named = _METHOD.search(command)
        method = named.group(1) if named else "POST" if _DATA.search(command) else "GET"
        is_with_key = "Authorization" in command or "x-api-key" in command
        calls += [(path, (method,)) for path in _URL.findall(command) if is_with_key]
    calls += [(path, _METHODS) for path in _HELPER.findall(code)]
    for name in _CLIENT.findall(code):
        if operation := OPERATIONS.get(name):
            calls.append((operation.path, (operation.verb.upper(),)))
    return calls


def documented_calls() -> list[tuple[str, str, tuple[str, ...]]]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = blocks_of(text) if page.suffix == ".md" else [CodeBlock(1, "python", "", text)]
        for block in blocks:
            if not uses_session(block):
                found += [(f"{page.relative_to(ROOT)}:{block.line}", *call) for call in calls_of(block)]
    return found


def uses_session(block: CodeBlock) -> bool:
    """Return whether the block's calls are those of a signed-in user, who may have permissions that no key has."""
    return "session" in block.marks and "Authorization" not in block.code


def test_an_api_key_can_have_the_permission_of_each_documented_call() -> None:
    calls = documented_calls()
    assert len(calls) > 40
    wrong = {f"{place} {path}": problem_of(path, methods) for place, path, methods in calls}
    assert {place: problem for place, problem in wrong.items() if problem} == {}


def test_each_call_of_a_session_is_one_of_the_client() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page.read_text(encoding="utf-8")) if uses_session(block)]
    called = [name for block in blocks for name in _CLIENT.findall(block.code)]
    assert len(called) >= 4
    assert [name for name in called if name not in OPERATIONS] == []


def test_each_command_of_a_tenant_can_be_run_with_an_api_key() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "platform/millrace/cli").glob("*.py")))
    named = [command["operation"] for group in described_groups().values() for command in group["commands"].values()]
    named += _CLIENT.findall(code)
    called = {name for name in named if name in OPERATIONS and not name.startswith("operator.")}
    assert len(called) > 50
    problems = {name: problem_of(OPERATIONS[name].path, (OPERATIONS[name].verb.upper(),)) for name in sorted(called)}
    assert {name: problem for name, problem in problems.items() if problem} == {}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ('curl $BASE/api/keys -H "Authorization: Bearer $KEY"', None),
        ('curl -X PATCH $BASE/api/billing/profile -H "Authorization: Bearer $KEY"', None),
        ('curl -X DELETE $BASE/api/tenant -H "Authorization: Bearer $KEY"', "tenant.delete"),
        ('curl $BASE/api/tenant/restore -H "x-api-key: $KEY" -d "{}"', "tenant.delete"),
        ('curl $BASE/api/operator/tenants -H "Authorization: Bearer $KEY"', "accepts no API key"),
        ('curl $BASE/api/nothing -H "Authorization: Bearer $KEY"', "does not exist"),
        ('call("/api/tenant/restore", {})', "tenant.delete"),
        ("client.tenant.restore()", "tenant.delete"),
        ("client.operator.tenants.list()", "accepts no API key"),
        ("client.keys.list()", None),
    ],
)
def test_a_call_that_no_key_may_do_is_found(code: str, problem: str | None) -> None:
    ((path, methods),) = calls_of(CodeBlock(1, "sh", "", code))
    assert (problem_of(path, methods) or "None").find(str(problem)) >= 0
