"""Names and descriptions of the OpenAPI document of the management API.

Only the URLs and the settings name this module: a gateway does not need drf-spectacular.
"""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import get_doc, get_lib_doc_excludes

from tenants.api.idempotency import HEADER
from tenants.api.serializers import Query, StrictModelSerializer, StrictSerializer
from tenants.api.target_problems import WithProblems
from tenants.authentication import ApiKeyAuthentication


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # registers itself when defined
    """The description of API keys."""

    target_class = ApiKeyAuthentication
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "An API key with the scope `manage`."}


class ManagementSchema(AutoSchema):
    """The description of a view. A schema has the name of its serializer without `Serializer`.

    `BudgetList` is a page of `Budget`. The body of a PATCH has a serializer of its own, such as
    `BudgetUpdateSerializer`, and none of its fields is required.
    """

    def get_description(self) -> str:  # type: ignore[override]
        """Return the docstring of the method, or the text of the view's action. A class describes no operation."""
        texts: dict[str, str] = getattr(self.view, "action_texts", {})
        if texts:
            return texts[self.view.action_name]  # type: ignore[attr-defined]  # such a view has both
        return get_doc(getattr(self.view, self.method.lower()))

    def get_tags(self) -> list[str]:
        """Return the tags of the view's class, or else the first part of the path."""
        tags: list[str] = getattr(self.view, "schema_tags", None) or super().get_tags()
        return tags

    def get_paginated_name(self, serializer_name: str) -> str:
        return f"{serializer_name}List"

    def _get_serializer_name(self, serializer: Any, direction: Any, bypass_extensions: bool = False) -> str:
        name: str = super()._get_serializer_name(serializer, direction, bypass_extensions)
        return name.removeprefix("Patched")


def inline_empty_values(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Replace the components that drf-spectacular adds for null and for an empty text."""
    values = {"NullEnum": {"type": "null"}, "BlankEnum": {"const": ""}}
    schemas = result["components"]["schemas"]
    for component in schemas.values():
        for field in component.get("properties", {}).values():
            for variant in field.get("oneOf", ()):
                name = variant.get("$ref", "").rpartition("/")[2]
                if name in values:
                    variant.clear()
                    variant.update(values[name])
    for name in values:
        schemas.pop(name, None)
    return result


def share_parameters(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Move the parameters that most operations have into components."""
    names = {"cursor": "Cursor", "limit": "Limit", "tenant": "Tenant", HEADER.name: "IdempotencyKey"}
    shared: dict[str, Any] = {}
    for operations in result["paths"].values():
        for operation in operations.values():
            for index, parameter in enumerate(operation.get("parameters", ())):
                name = names.get(parameter["name"])
                if name and shared.setdefault(name, parameter) == parameter:
                    operation["parameters"][index] = {"$ref": f"#/components/parameters/{name}"}
    result["components"]["parameters"] = dict(sorted(shared.items()))
    return result


def base_classes() -> list[type]:
    """Return the classes whose docstrings do not describe a schema."""
    found: list[type] = get_lib_doc_excludes()  # type: ignore[no-untyped-call]
    return [*found, Query, StrictModelSerializer, StrictSerializer, WithProblems]
