"""docs/management-openapi.yaml agrees with the code, and changes of an API document are found."""

from __future__ import annotations

from typing import Any

import pytest

from tools.openapi import changes, management
from tools.openapi.formatting import as_yaml, read_yaml

DOCUMENT = read_yaml(management.DOCUMENT.read_text(encoding="utf-8"))
OPERATIONS = [(verb, path, operation) for path, verbs in DOCUMENT["paths"].items() for verb, operation in verbs.items()]


def test_the_document_is_generated_from_the_code() -> None:
    written = management.DOCUMENT.read_text(encoding="utf-8")
    assert written == management.render(), "docs/management-openapi.yaml is out of date: run `make docs-openapi`"


def test_every_operation_has_a_description() -> None:
    assert [(verb, path) for verb, path, operation in OPERATIONS if not operation["description"]] == []


def test_a_body_of_a_patch_requires_no_field_and_belongs_to_patches() -> None:
    bodies: dict[str, set[str]] = {}
    for verb, _, operation in OPERATIONS:
        for body in operation.get("requestBody", {}).get("content", {}).values():
            bodies.setdefault(body["schema"].get("$ref", "").rpartition("/")[2], set()).add(verb)
    patched = {name for name, verbs in bodies.items() if "patch" in verbs}
    assert len(patched) > 10
    for name in patched:
        assert bodies[name] == {"patch"}, name
        assert "required" not in DOCUMENT["components"]["schemas"][name]


BEFORE: dict[str, Any] = {
    "paths": {"/api/a": {"get": {"parameters": [{"name": "x", "schema": {"type": "string"}}], "tags": ["t"]}}},
    "components": {"schemas": {"A": {"required": ["x", "y"]}, "B": {}}},
}


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (BEFORE, []),
        ({"paths": BEFORE["paths"]}, ["- schemas/A", "- schemas/B"]),
        (BEFORE | {"paths": {}}, ["- GET /api/a"]),
        (
            BEFORE | {"components": {"schemas": {"A": {"required": ["y", "z"]}, "B": {}, "C": {"type": "null"}}}},
            ["~ schemas/A", "    - required.x: x", "    + required.z: z", "+ schemas/C"],
        ),
        (
            BEFORE
            | {
                "paths": {
                    "/api/a": {"get": {"parameters": [{"name": "x", "schema": {"type": "number"}}], "tags": ["t"]}}
                }
            },
            [
                "~ GET /api/a",
                "    ~ parameters.x.schema.type: string -> number",
            ],
        ),
    ],
)
def test_changes_are_listed_by_operation_and_schema(after: dict[str, Any], expected: list[str]) -> None:
    assert changes.list_changes(BEFORE, after) == expected


def test_an_order_of_plain_values_is_no_change() -> None:
    after = BEFORE | {"components": {"schemas": {"A": {"required": ["y", "x"]}, "B": {}}}}
    assert changes.list_changes(BEFORE, after) == []


def test_a_written_document_is_read_again() -> None:
    assert read_yaml(as_yaml(BEFORE, "# A comment.\n")) == BEFORE
