"""Comparison of a provider's usage export with the booked executions.

The export is a CSV with a row for each request, or for each day and model. A request's row also corrects the tenant's
charge, but only downward: if the provider counted fewer tokens than the tenant was charged for, an adjustment credits
the difference. Nothing else changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, DecimalException, localcontext
from typing import Any

from django.db import connection

from billing.costs.lowered_charges import lower_charge
from billing.currencies.amounts import FEMTO_DIGITS
from billing.models import ExecutionCost, UsageSource
from inference_worker.contract.request import PROMPT_CLASSES, TOKEN_CLASSES, TokenCounts
from tenants import csv_tables
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

MAX_ROWS = 200_000
MAX_TOKENS = 10**15  # tokens in a row
ROUNDING_FEMTO = 10**9  # tolerance of a row's cost: a millionth of a dollar
_MAX_USD = Decimal(10) ** 9
_BATCH = 1000
# The columns, with the names that providers use for them.
COLUMNS: dict[str, tuple[str, ...]] = {
    "day": ("date", "start_time", "startTime", "timestamp"),
    "model": ("model_name",),
    "request_id": ("request",),
    "input_tokens": ("prompt_tokens",),
    "cached_tokens": ("cache_read_tokens", "cache_read_input_tokens", "input_cached_tokens"),
    "output_tokens": ("completion_tokens",),
    "cost_usd": ("cost", "spend", "amount"),
}
_NEEDED = ("day", "model", "input_tokens", "output_tokens")


@dataclass
class ProviderCounts:
    """Tokens and cost of a request, or of a day and model. `cost_femto`: None if the export has none."""

    input_tokens: int = 0
    cached_tokens: int | None = None  # part of the input
    output_tokens: int = 0
    cost_femto: int | None = None
    rows: int = 1

    def add(self, other: ProviderCounts) -> None:
        """Add the counts of another row."""
        self.rows += other.rows
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        if other.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + other.cached_tokens
        if other.cost_femto is not None:
            self.cost_femto = (self.cost_femto or 0) + other.cost_femto


@dataclass
class ProviderExport:
    """The rows of an export, by the provider's names of models."""

    requests: dict[tuple[str, str], ProviderCounts] = field(default_factory=dict)  # (request ID, model)
    days: dict[tuple[date, str], ProviderCounts] = field(default_factory=dict)  # sums of all rows


@dataclass
class Difference:
    """A request, or a day and model, that the provider and the booked executions count differently."""

    day: date
    model: str
    request_id: str  # empty: of the whole day
    provider: ProviderCounts | None  # None: the export has no such request
    booked: ProviderCounts | None  # None: nothing is booked
    credit_femto: int = 0  # what the tenant is charged too much
    is_credited: bool = False  # the adjustment is written, now or earlier


@dataclass
class ExportComparison:
    """The result of a comparison."""

    days: int  # pairs of day and model
    requests: int  # in the export
    differences: list[Difference]


def read_export(lines: Iterable[str]) -> ProviderExport:
    """Read a provider's export.

    Raises:
        ValueError: naming the line.
    """
    reader = csv_tables.read_table(lines, strict=True)
    export = ProviderExport()
    try:
        found = _columns(reader.fieldnames or [])
        for number, row in enumerate(reader, 1):
            if number > MAX_ROWS:
                raise ValueError(f"use at most {MAX_ROWS:,} rows")
            values = {name: csv_tables.unguard_cell((row[column] or "").strip()) for name, column in found.items()}
            day, model, counted = _day(values["day"]), values["model"], _read_counts(values)
            export.days.setdefault((day, model), ProviderCounts(rows=0)).add(counted)
            if request_id := values.get("request_id"):
                export.requests.setdefault((request_id, model), ProviderCounts(rows=0)).add(counted)
    except (ValueError, csv_tables.Error) as exc:
        raise ValueError(f"line {max(reader.line_num, 1)}: {exc}") from exc
    return export


def compare(
    export: ProviderExport, models: Mapping[str, str] | None = None, *, apply: bool = False
) -> ExportComparison:
    """Compare the export with the booked executions. With `apply`, credit what tenants are charged too much.

    Each execution is credited at most once, so the comparison can be repeated, also after it was interrupted.

    Args:
        models: deployment -> the provider's name of its model. Other deployments have the provider's names.
    """
    names = dict(models or {})
    with all_tenants_scope(BypassReason.BILLING):
        rows = _find_booked(export, names)
    by_request: dict[tuple[str, str], list[ExecutionCost]] = defaultdict(list)
    by_day: dict[tuple[date, str], ProviderCounts] = {}
    for row in rows:
        model = names.get(row.model, row.model)
        by_request[row.request_id, model].append(row)
        by_day.setdefault((row.admitted_at.astimezone(UTC).date(), model), ProviderCounts(rows=0)).add(_sums([row]))
    differences = [
        Difference(day, model, "", counted, by_day.get((day, model)))
        for (day, model), counted in sorted(export.days.items())
        if _differs(counted, by_day.get((day, model)))
    ]
    for (request_id, model), counted in sorted(export.requests.items()):
        of_request = by_request.get((request_id, model), [])
        booked = _sums(of_request) if of_request else None
        credit, is_credited = _credit(of_request, counted, apply=apply)
        if _differs(counted, booked) or credit:
            day = of_request[0].admitted_at.astimezone(UTC).date() if of_request else _first_day(export, model)
            differences.append(Difference(day, model, request_id, counted, booked, credit, is_credited))
    if export.requests:
        for (request_id, model), of_request in sorted(by_request.items()):
            if (request_id, model) not in export.requests:
                day = of_request[0].admitted_at.astimezone(UTC).date()
                differences.append(Difference(day, model, request_id, None, _sums(of_request)))
    return ExportComparison(len(export.days), len(export.requests), differences)


def _columns(header: Sequence[str]) -> dict[str, str]:
    found = {}
    for name, others in COLUMNS.items():
        present = [column for column in (name, *others) if column in header]
        if present:
            found[name] = present[0]
        elif name in _NEEDED:
            raise ValueError(f"the column {name} is missing")
    return found


def _day(text: str) -> date:
    try:
        if len(text) == len("2026-11-01"):
            return date.fromisoformat(text)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a day: use YYYY-MM-DD") from None
    return (moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment).astimezone(UTC).date()


def _read_counts(values: Mapping[str, str]) -> ProviderCounts:
    cached = values.get("cached_tokens")
    cost = values.get("cost_usd")
    counted = ProviderCounts(
        _tokens(values["input_tokens"]),
        _tokens(cached) if cached else None,
        _tokens(values["output_tokens"]),
        _femto(cost) if cost else None,
    )
    if (counted.cached_tokens or 0) > counted.input_tokens:
        raise ValueError("cached_tokens is more than input_tokens, which includes them")
    return counted


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text[:17]) > MAX_TOKENS:
        raise ValueError(f"{text!r} is not a number of tokens")
    return int(text)


def _femto(text: str) -> int:
    """Convert USD to femto-USD. Smaller parts are cut off."""
    try:
        with localcontext(prec=60):
            amount = Decimal(text)
            if not 0 <= amount < _MAX_USD:
                raise ValueError
            return int(amount.scaleb(FEMTO_DIGITS))
    except (DecimalException, ValueError):
        raise ValueError(f"{text!r} is not an amount in USD") from None


def _find_booked(export: ProviderExport, names: Mapping[str, str]) -> list[ExecutionCost]:
    """Return the booked executions of upstreams on the export's days and of its requests."""
    exported = {model for _, model in export.days}
    models = [name for name, exported_name in names.items() if exported_name in exported]
    models += [name for name in exported if name not in names]
    found: dict[Any, ExecutionCost] = {}
    for day in sorted({day for day, _ in export.days}):
        start = datetime.combine(day, datetime.min.time(), UTC)
        rows = ExecutionCost.objects.filter(
            admitted_at__gte=start, admitted_at__lt=start + timedelta(days=1), model__in=models
        )
        found |= {row.pk: row for row in rows if (day, names.get(row.model, row.model)) in export.days}
    ids = sorted({request_id for request_id, _ in export.requests})
    for place in range(0, len(ids), _BATCH):
        # A provider may count a request on the next day.
        rows = ExecutionCost.objects.filter(request_id__in=ids[place : place + _BATCH], model__in=models)
        found |= {row.pk: row for row in rows}
    return [row for _, row in sorted(found.items()) if row.usage_source != UsageSource.ENGINE]


def _sums(rows: Sequence[ExecutionCost]) -> ProviderCounts:
    counted = ProviderCounts(cached_tokens=0, cost_femto=0, rows=0)
    for row in rows:
        tokens = sum(getattr(row, name) for name in PROMPT_CLASSES)
        counted.add(ProviderCounts(tokens, row.cache_read, row.output, int(row.cost_femto)))
    return counted


def _differs(provider: ProviderCounts, booked: ProviderCounts | None) -> bool:
    """Return whether tokens differ, or costs by more than the provider's rounding."""
    if booked is None or (provider.input_tokens, provider.output_tokens) != (booked.input_tokens, booked.output_tokens):
        return True
    if provider.cached_tokens is not None and provider.cached_tokens != booked.cached_tokens:
        return True
    if provider.cost_femto is None or booked.cost_femto is None:
        return False
    return abs(provider.cost_femto - booked.cost_femto) > ROUNDING_FEMTO * provider.rows


def _first_day(export: ProviderExport, model: str) -> date:
    return min(day for day, name in export.days if name == model)


def _credit(rows: Sequence[ExecutionCost], counted: ProviderCounts, *, apply: bool) -> tuple[int, bool]:
    """Return what the tenant is charged too much for a request's executions, and whether it is credited.

    The provider's tokens are distributed over the executions in their order.
    """
    credit, is_credited = 0, False
    left = ProviderCounts(counted.input_tokens, counted.cached_tokens, counted.output_tokens)
    for row in rows:
        booked = TokenCounts(**{name: getattr(row, name) for name in TOKEN_CLASSES})
        wanted = _fit_counts(booked, left)
        left.input_tokens -= wanted.prompt
        left.output_tokens -= wanted.output
        if left.cached_tokens is not None:
            left.cached_tokens = max(0, left.cached_tokens - wanted.cache_read)
        if wanted == booked:
            continue
        with all_tenants_scope(BypassReason.BILLING, durable=True), connection.cursor() as cursor:
            key = row.admitted_at, row.request_id, row.execution
            lowered = lower_charge(cursor, key, wanted, apply=apply)
        credit += lowered.femto
        is_credited |= lowered.is_written
    return credit, is_credited


def _fit_counts(counts: TokenCounts, limit: ProviderCounts) -> TokenCounts:
    """Return the counts, reduced to the provider's. Excess input is taken from the uncached tokens first."""
    tokens = {name: getattr(counts, name) for name in TOKEN_CLASSES}
    excess = max(0, counts.prompt - limit.input_tokens)
    for name in sorted(PROMPT_CLASSES, key=lambda name: name == "cache_read"):  # cache reads last
        removed = min(excess, tokens[name])
        tokens[name] -= removed
        excess -= removed
    if limit.cached_tokens is not None:
        moved = min(max(0, limit.cached_tokens - tokens["cache_read"]), tokens["uncached"])
        tokens["uncached"] -= moved
        tokens["cache_read"] += moved
    tokens["output"] = min(tokens["output"], limit.output_tokens)
    return TokenCounts(**tokens)
