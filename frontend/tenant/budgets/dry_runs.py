"""What a limit that somebody types would do: whether it blocks, when, and what it would have refused last week."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from frontend.core.numbers import exact, share
from frontend.tenant.budgets.amounts import BudgetAmount, parse
from frontend.tenant.budgets.scopes import BudgetOwnerScope
from frontend.tenant.keys.bounds import NAMES
from millrace.apps.records.dry_runs import DryRunResult, budget_would_refuse, limits_would_refuse
from tenants.models import LIMITS

_UNTIL = {"day": "the next day begins", "month": "the next month begins", "lifetime": "it is raised"}
_PERIODS = {"day": "a day", "month": "a month", "lifetime": "in total"}
UNTRIED = ("long_queue", "long_cap")
_WHEN = {
    "requests": "when the bucket is empty; it fills evenly",
    "tokens": "when a request’s tokens do not fit; the bucket fills evenly",
    "concurrency": "when that number is already running",
    "max": "with 400: the request itself is too long",
    "long_queue": "Blocks nothing: longer prompts wait in a queue of their own",
    "long_cap": "Blocks nothing: further long jobs wait",
}


@dataclass(frozen=True)
class Sentence:
    """`kind` is a badge's: what blocks, what does not. `would` is empty if there is nothing to try."""

    blocks: str
    kind: str
    when: str
    would: str


@dataclass(frozen=True)
class LimitSentence:
    name: str
    when: str
    would: str


def of_budget(
    tenant_id: int, owner: BudgetOwnerScope | None, mode: str, unit: str, period: str, amount: str
) -> Sentence:
    """About a budget as it is typed so far. In the tenant's scope."""
    code = "429 budget_exceeded" if unit == "money" else "429 quota_exceeded"
    until = _UNTIL.get(period, "it begins again")
    blocks, kind, when = {
        "hard": ("Blocks", "bad", f"A request that does not fit what is left gets {code}, until {until}."),
        "soft": ("Does not block", "good", "Nothing is refused. It counts, and alerts at its thresholds."),
        "dry_run": ("Does not block", "good", "Nothing is refused. What it would have refused is counted, to try it."),
    }.get(mode, ("", "", ""))
    try:
        limit = parse(amount, unit)
    except ValueError as exc:
        return Sentence(blocks, kind, when, str(exc) if amount else "")
    if owner is None or period not in _PERIODS:
        return Sentence(blocks, kind, when, "")
    tried = budget_would_refuse(owner.scope(tenant_id), unit, period, limit)
    would = (
        f"A hard limit of {BudgetAmount.whole(unit, limit).text} {_PERIODS[period]} would have refused {_said(tried)}."
    )
    return Sentence(blocks, kind, when, would)


def of_limits(
    tenant_id: int, owner: BudgetOwnerScope | None, model: str, given: Mapping[str, str], *, dry_run: bool
) -> Iterable[LimitSentence]:
    """About each limit of a set as it is typed so far. In the tenant's scope."""
    values, faults = {}, {}
    for name in LIMITS:
        if text := given.get(name, "").strip():
            try:
                values[name] = parse(text, "requests")
            except ValueError as exc:
                faults[name] = str(exc)
    asked = {name: value for name, value in values.items() if name not in UNTRIED}
    tried = limits_would_refuse(owner.scope(tenant_id, model), asked) if owner and asked else {}
    for name in NAMES:
        would = f"Last week: {_said(tried[name])}." if name in tried else faults.get(name, "")
        yield LimitSentence(name, _when(name, dry_run=dry_run), would)


def _when(name: str, *, dry_run: bool) -> str:
    if name in UNTRIED:
        return f"{_WHEN[name]}."
    kind = "max" if name.startswith("max_") else name if name in _WHEN else name.partition("_per_")[0]
    how = _WHEN.get(kind, _WHEN["tokens"])
    if dry_run:
        return "Does not block: counts what it would refuse."
    return f"Blocks {how}." if kind == "max" else f"Blocks with 429 {how}."


def _said(tried: DryRunResult) -> str:
    if not tried.requests:
        return "nothing: there was no request in the last 7 days"
    since = "of the last 7 days" if tried.complete else "that were looked at, from 7 days ago on"
    part = f" ({share(tried.refused, tried.requests)})" if tried.refused else ""
    return f"{exact(tried.refused)} of the {exact(tried.requests)} requests {since}{part}"
