"""The parts of docs/reference that are generated from code when the site is built.

A page names such a part between two marks, with a text for readers of the file:

    <!-- generated: errors -->
    *The site has the table here, from …*
    <!-- end of errors -->

`tools/site_hooks.py` replaces both marks and the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from tools.openapi.formatting import read_yaml
from tools.openapi.management import DOCUMENT
from tools.screenshots import BUILT, available

_PART = re.compile(r"<!-- generated: ([\w-]+) -->\n.*?<!-- end of \1 -->\n", re.DOTALL)


def errors_table() -> str:
    """Return the table of all error codes of `/v1`."""
    from millrace.gateway.core.errors import CODES, ApiError
    from millrace.gateway.protocols.dialects import ANTHROPIC

    rows = []
    for code in sorted(CODES, key=lambda code: (CODES[code][0], code)):
        error = ApiError(code, "")
        headers = dict(error.headers())
        retry = "no" if b"x-should-retry" in headers else "after `retry-after`" if b"retry-after" in headers else ""
        anthropic = f"{ANTHROPIC.status(error)} `{ANTHROPIC.body(error, '')['error']['type']}`"
        rows.append(f"| `{code}` | {error.status} | `{error.type}` | {anthropic} | {retry} |")
    return _table(["code", "status", "type", "Anthropic", "retry"], rows)


def operations_tables() -> str:
    """Return a table of the management API's operations for each resource."""
    from tools.generate_client import operations_of

    parts = []
    for resource, operations in sorted(operations_of(read_yaml(DOCUMENT.read_text(encoding="utf-8"))).items()):
        rows = []
        for operation in sorted(operations, key=lambda found: (found.path, found.verb)):
            names = ", ".join(f"`{argument.wire}`" for argument in operation.query)
            text = " ".join(operation.text.split()).replace("|", "\\|")
            rows.append(f"| `{operation.verb.upper()} {operation.path}` | {text} | {names} |")
        parts.append(f"## {resource}\n\n{_table(['operation', 'description', 'parameters'], rows)}")
    return "\n".join(parts)


@cache
def metrics_tables() -> Mapping[str, str]:
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
        "vllm": _table(["name", "type", "further labels", "meaning"], vllm),
        "replica": _table(["name", "type", "further labels", "meaning"], other),
        "gateway": _table(["name", "type", "labels", "meaning"], _gateway_metric_rows()),
    }


def _gateway_metric_rows() -> list[str]:
    from billing.metering.status import SettlerStatus
    from millrace.gateway.dispatch.metrics import GatewayMetrics
    from millrace.gateway.dispatch.replicas import ReplicaRegistry

    metrics = GatewayMetrics(ReplicaRegistry())
    # A metric has labels only if it has a sample.
    for metric, count in (
        (metrics.requests, 2),
        (metrics.time_to_first_token, 1),
        (metrics.tokens, 2),
        (metrics.answers, 2),
        (metrics.shadows, 2),
        (metrics.records_lost, 1),
        (metrics.stage_failures, 2),
    ):
        metric.labels(*("" for _ in range(count)))
    metrics.settler.status = SettlerStatus(0, "", settled=0, repeated=0, quarantined=0, backlog=0, lag_ms=0)
    metrics.outboxes.totals = (("", "", 0),)
    rows = []
    for family in metrics.registry.collect():
        labels = [name for name in family.samples[0].labels if name != "le"]
        rows.append(_metric_row(family.name, family.type, labels, family.documentation))
    return rows


def _metric_row(name: str, kind: str, labels: Sequence[str], text: str) -> str:
    suffix = "_total" if kind == "counter" else ""
    return f"| `{name}{suffix}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |"


def price_components_table() -> str:
    """Return the table of the components of prices."""
    from billing.rates.pricing import Component

    rows = (
        f"| `{component}` | {component.invoice_label} | million {component.unit} | {'yes' * component.is_optional} |"
        for component in Component
    )
    return _table(["component", "on invoices", "price of a", "optional"], rows)


def event_types_table() -> str:
    """Return the table of the types of webhook events."""
    from tenants.webhooks.event_types import EVENT_TYPES

    rows = [f"| `{name}` | {event_type.emitted} |" for name, event_type in EVENT_TYPES.items()]
    return _table(["event type", "sent when"], rows)


def event_fields_tables() -> str:
    """Return the tables of the fields in the data of webhook events."""
    from tenants.webhooks.event_types import EVENT_TYPES

    types: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, event_type in EVENT_TYPES.items():
        types.setdefault(tuple(event_type.fields.items()), []).append(name)
    parts = []
    for fields, names in types.items():
        rows = [f"| `{field}` | {meaning} |" for field, meaning in fields]
        parts.append(f"`data` of {', '.join(f'`{name}`' for name in names)}:\n\n{_table(['field', 'meaning'], rows)}")
    return "\n".join(parts)


def _commands() -> str:
    from millrace.cli.command_reference import commands_as_markdown

    return commands_as_markdown()


def _parameters() -> str:
    from tools.generate_parameters import parameters_tables

    return parameters_tables()


def _settings() -> str:
    from millrace.cli.reference import as_markdown

    return as_markdown()


def _screens() -> str:
    from tests.support.frontend.gallery import gallery

    end = "-light-1440"
    names = [name.removesuffix(end) for name in available((BUILT,)) if name.endswith(end)]
    return gallery(names) if names else "The screenshots are not built. Run `make screenshots`, then `make docs`."


def _clients(part: str) -> str:
    from tests.support.clients import tables

    return str(getattr(tables, part)())


def _table(titles: list[str], rows: Iterable[str]) -> str:
    return "\n".join([f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *rows, ""])


PARTS: Mapping[str, Callable[[], str]] = {
    "client-features": lambda: _clients("features_table"),
    "client-notes": lambda: _clients("notes"),
    "clients": lambda: _clients("clients_table"),
    "commands": _commands,
    "errors": errors_table,
    "event-fields": event_fields_tables,
    "event-types": event_types_table,
    "gateway-metrics": lambda: metrics_tables()["gateway"],
    "operations": operations_tables,
    "parameters": _parameters,
    "price-components": price_components_table,
    "replica-metrics": lambda: metrics_tables()["replica"],
    "screens": _screens,
    "settings": _settings,
    "vllm-metrics": lambda: metrics_tables()["vllm"],
}


def with_parts(page: str) -> str:
    """Return a page with its generated parts in place of their marks."""
    return _PART.sub(lambda match: f"{part(match[1]).rstrip()}\n", page)


@cache
def part(name: str) -> str:
    """Return a generated part."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.support.typing_settings")
    import django

    django.setup()
    return PARTS[name]()
