"""Simulation of a limit while it is typed: when it rejects requests, and how many it would have rejected last week."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import exact, share
from frontend.tenant.budgets.amounts import BudgetAmount, parse
from frontend.tenant.budgets.scopes import BudgetOwnerScope
from frontend.tenant.keys.key_limits import NAMES
from millrace.apps.policy_results.dry_runs import DryRunResult, budget_would_refuse, limits_would_refuse
from tenants.models import LIMITS

_UNTIL = {"day": _lazy("the next day"), "month": _lazy("the next month"), "lifetime": _lazy("you raise the limit")}
_PERIODS = {"day": _lazy("per day"), "month": _lazy("per month"), "lifetime": _lazy("in total")}
NOT_SIMULATED = ("long_prompt_threshold", "long_prompt_concurrency")
_WHEN = {
    "requests": _lazy("when the token bucket is empty; it refills continuously"),
    "tokens": _lazy("when a request’s tokens exceed the bucket; it refills continuously"),
    "concurrency": _lazy("when this many requests are running"),
    "max": _lazy("with 400 if the request is too long"),
    "long_prompt_threshold": _lazy("Blocks nothing: longer prompts use a separate queue"),
    "long_prompt_concurrency": _lazy("Blocks nothing: more long prompts wait"),
}


@dataclass(frozen=True)
class BudgetSimulation:
    """The effect of a budget. `kind` is the color of the badge. `would` is empty if there is nothing to simulate."""

    blocks: str
    kind: str
    when: str
    would: str


@dataclass(frozen=True)
class LimitSimulation:
    name: str
    when: str
    would: str


def simulate_budget(
    tenant_id: int, owner: BudgetOwnerScope | None, mode: str, unit: str, period: str, amount: str
) -> BudgetSimulation:
    """Return the effect of a budget as typed so far. Call inside the tenant's scope."""
    code = "429 budget_exceeded" if unit == "money" else "429 quota_exceeded"
    until = _UNTIL.get(period, _("the budget resets"))
    blocks, kind, when = {
        "hard": (
            _("Blocks"),
            "bad",
            _("A request that exceeds the remaining budget receives %(code)s until %(until)s.")
            % {"code": code, "until": until},
        ),
        "soft": (_("Does not block"), "good", _("No requests are rejected. Alerts are sent at the thresholds.")),
        "dry_run": (_("Does not block"), "good", _("No requests are rejected. Requests over budget are counted.")),
    }.get(mode, ("", "", ""))
    try:
        limit = parse(amount, unit)
    except ValueError as exc:
        return BudgetSimulation(blocks, kind, when, str(exc) if amount else "")
    if owner is None or period not in _PERIODS:
        return BudgetSimulation(blocks, kind, when, "")
    tried = budget_would_refuse(owner.scope(tenant_id), unit, period, limit)
    amount_text, rejected = BudgetAmount.from_units(unit, limit).text, _rejected_text(tried)
    would = _("A hard limit of %(amount)s %(period)s would have rejected %(rejected)s.") % {
        "amount": amount_text,
        "period": _PERIODS[period],
        "rejected": rejected,
    }
    return BudgetSimulation(blocks, kind, when, would)


def simulate_limits(
    tenant_id: int, owner: BudgetOwnerScope | None, model: str, context: Mapping[str, str], *, dry_run: bool
) -> Iterable[LimitSimulation]:
    """Yield the effect of each rate limit as typed so far. Call inside the tenant's scope."""
    values, errors = {}, {}
    for name in LIMITS:
        if text := context.get(name, "").strip():
            try:
                values[name] = parse(text, "requests")
            except ValueError as exc:
                errors[name] = str(exc)
    simulated = {name: value for name, value in values.items() if name not in NOT_SIMULATED}
    tried = limits_would_refuse(owner.scope(tenant_id, model), simulated) if owner and simulated else {}
    for name in NAMES:
        would = (
            _("Last week: %(rejected_text)s.") % {"rejected_text": _rejected_text(tried[name])}
            if name in tried
            else errors.get(name, "")
        )
        yield LimitSimulation(name, _when(name, dry_run=dry_run), would)


def _when(name: str, *, dry_run: bool) -> str:
    if name in NOT_SIMULATED:
        return f"{_WHEN[name]}."
    kind = "max" if name.startswith("max_") else name if name in _WHEN else name.partition("_per_")[0]
    how = _WHEN.get(kind, _WHEN["tokens"])
    if dry_run:
        return _("Does not block: counts requests over the limit.")
    return _("Blocks %(how)s.") % {"how": how} if kind == "max" else _("Blocks with 429 %(how)s.") % {"how": how}


def _rejected_text(tried: DryRunResult) -> str:
    if not tried.requests:
        return _("nothing (no requests in the last 7 days)")
    since = _("from the last 7 days") if tried.complete else _("checked from the last 7 days")
    part = f" ({share(tried.refused, tried.requests)})" if tried.refused else ""
    return _("%(refused)s of the %(requests)s requests %(since)s%(part)s") % {
        "refused": exact(tried.refused),
        "requests": exact(tried.requests),
        "since": since,
        "part": part,
    }
