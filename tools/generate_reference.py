"""Writes the pages of docs/reference that are generated from code. `make docs-reference` runs this.

A unit test compares the result with the committed pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.openapi.formatting import read_yaml
from tools.openapi.management import DOCUMENT

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
and idempotency keys. `/api/docs/` of a running platform shows bodies and responses.
[management-openapi.yaml](../management-openapi.yaml) describes all of `/api` in OpenAPI 3.1; `/api/schema/` returns it.
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


def metrics_sections() -> dict[str, str]:
    """Return the tables of the metrics page."""
    from inference_worker.contract import metric_families as families
    from millrace.gateway.dispatch.replica_metrics import STATE

    groups = {
        "gauge": [*(family for family, _ in STATE), *families.GAUGES],
        "counter": families.COUNTERS,
        "histogram": families.HISTOGRAMS,
    }
    vllm: list[str] = []
    other: list[str] = []
    for kind, found in groups.items():
        for family in found:
            row = _metric_row(family.name, kind, [family.label] if family.label else [], family.help)
            (vllm if family.name.startswith("vllm:") else other).append(row)
    return {
        "vllm-metrics": _table(["name", "type", "further labels", "meaning"], vllm),
        "replica-metrics": _table(["name", "type", "further labels", "meaning"], other),
        "gateway-metrics": _table(["name", "type", "labels", "meaning"], _gateway_metric_rows()),
    }


def _gateway_metric_rows() -> list[str]:
    from billing.metering.status import SettlerStatus
    from millrace.gateway.dispatch.metrics import GatewayMetrics
    from millrace.gateway.dispatch.replica_metrics import ReplicaMetrics
    from millrace.gateway.dispatch.replicas import ReplicaRegistry

    replicas = ReplicaRegistry(lambda: 0.0)
    replica_names = {family.name for family in ReplicaMetrics(replicas).collect()}
    metrics = GatewayMetrics(replicas)
    # A metric has labels only if it has a sample.
    for metric, count in (
        (metrics.requests, 2),
        (metrics.time_to_first_token, 1),
        (metrics.tokens, 2),
        (metrics.answers, 2),
        (metrics.shadows, 2),
        (metrics.records_lost, 1),
    ):
        metric.labels(*("" for _ in range(count)))
    metrics.settler.status = SettlerStatus(0, "", settled=0, repeated=0, quarantined=0, backlog=0, lag_ms=0)
    metrics.outboxes.totals = (("", "", 0),)
    rows = []
    for family in metrics.registry.collect():
        if family.name in replica_names:
            continue
        labels = [name for name in family.samples[0].labels if name != "le"]
        rows.append(_metric_row(family.name, family.type, labels, family.documentation))
    return rows


def _metric_row(name: str, kind: str, labels: Sequence[str], text: str) -> str:
    suffix = "_total" if kind == "counter" else ""
    return f"| `{name}{suffix}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |"


def webhooks_sections() -> dict[str, str]:
    """Return the tables of the webhooks page: the types of events, and the fields of their data."""
    from tenants.webhooks.event_types import EVENT_TYPES

    types: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, event_type in EVENT_TYPES.items():
        types.setdefault(tuple(event_type.fields.items()), []).append(name)
    parts = []
    for fields, names in types.items():
        rows = [f"| `{field}` | {meaning} |" for field, meaning in fields]
        parts.append(f"`data` of {', '.join(f'`{name}`' for name in names)}:\n\n{_table(['field', 'meaning'], rows)}")
    emitted = [f"| `{name}` | {event_type.emitted} |" for name, event_type in EVENT_TYPES.items()]
    return {"event-types": _table(["event type", "sent when"], emitted), "event-fields": "\n".join(parts)}


def _table(titles: list[str], rows: Iterable[str]) -> str:
    return "\n".join([f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *rows, ""])


def _replace_sections(name: str, sections: dict[str, str]) -> str:
    """Return a page with new sections between their marks."""
    page = (REFERENCE / name).read_text(encoding="utf-8")
    for section, text in sections.items():
        begin, end = f"<!-- {section}: written by `make docs-reference` -->\n", f"<!-- end of {section} -->\n"
        head, _, rest = page.partition(begin)
        _, found, foot = rest.partition(end)
        if not found:
            raise ValueError(f"{name} has no marks of the section {section}")
        page = f"{head}{begin}\n{text}\n{end}{foot}"
    return page


def pages(schema: dict[str, Any]) -> dict[str, str]:
    """Return the generated pages by file name."""
    from millrace.cli.command_reference import commands_as_markdown
    from tools.generate_parameters import parameters_page

    return {
        "commands.md": commands_as_markdown(_NOTE),
        "errors.md": errors_page(),
        "management-api.md": management_page(schema),
        "metrics.md": _replace_sections("metrics.md", metrics_sections()),
        "parameters.md": parameters_page(_NOTE),
        "webhooks.md": _replace_sections("webhooks.md", webhooks_sections()),
    }


def main() -> None:
    """Write the pages."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.support.typing_settings")
    import django

    django.setup()
    for name, text in pages(read_yaml(DOCUMENT.read_text(encoding="utf-8"))).items():
        (REFERENCE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
