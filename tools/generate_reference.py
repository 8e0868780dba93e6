"""Writes the pages of docs/reference that are generated from code. `make docs-reference` runs this.

A unit test compares the result with the committed pages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
_NOTE = "<!-- written by `make docs-reference` -->\n"


def errors_page() -> str:
    """Return the page of all error codes of `/v1`."""
    from millrace.gateway.core.errors import CODES, ApiError
    from millrace.gateway.protocols.dialects import ANTHROPIC

    rows = []
    for code in sorted(CODES, key=lambda code: (CODES[code][0], code)):
        error = ApiError(code, "")
        headers = dict(error.headers())
        retry = "no" if b"x-should-retry" in headers else "after `retry-after`" if b"retry-after" in headers else ""
        anthropic = f"{ANTHROPIC.status(error)} `{ANTHROPIC.body(error, '')['error']['type']}`"
        rows.append(f"| `{code}` | {error.status} | `{error.type}` | {anthropic} | {retry} |")
    return f"""# Error codes

{_NOTE}
All codes of errors of `/v1`. [Errors](api.md#errors) describes what they mean and what to do.

- *Status* and *type* apply to OpenAI's endpoints. Under `/v1/messages`, errors have Anthropic's status and type.
- *Retry*: `no` means that the response has `x-should-retry: false`, unless it has a `retry-after`. An empty cell means
  that a retry of the same request fails again, unless its cause has changed.
- A code that is not listed is an internal error, 500 `server_error`.

| code | status | type | Anthropic | retry |
|---|---|---|---|---|
""" + "\n".join([*rows, ""])


def management_page(schema: dict[str, Any]) -> str:
    """Return the page of all operations of the management API."""
    from tools.generate_client import operations_of

    parts = [
        f"""# Management API operations

{_NOTE}
All operations below `/api/`. [Management API](api.md#management-api-api) describes authentication, paging, errors
and idempotency keys. `/api/docs/` of a running platform shows bodies and responses. `/api/schema/` is the OpenAPI
document.
"""
    ]
    for resource, operations in sorted(operations_of(schema).items()):
        rows = [f"\n## {resource}\n", "| operation | description | parameters |", "|---|---|---|"]
        for operation in sorted(operations, key=lambda found: (found.path, found.verb)):
            names = ", ".join(f"`{argument.wire}`" for argument in operation.query)
            text = " ".join(operation.text.split()).replace("|", "\\|")
            rows.append(f"| `{operation.verb.upper()} {operation.path}` | {text} | {names} |")
        parts.append("\n".join([*rows, ""]))
    return "".join(parts)


def pages(schema: dict[str, Any]) -> dict[str, str]:
    """Return the generated pages by file name."""
    from millrace.cli.command_reference import commands_as_markdown

    return {
        "commands.md": commands_as_markdown(_NOTE),
        "errors.md": errors_page(),
        "management-api.md": management_page(schema),
    }


def main() -> None:
    """Write the pages."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.support.typing_settings")
    import django

    django.setup()
    from tools.generate_client import management_schema

    for name, text in pages(management_schema()).items():
        (REFERENCE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
