"""The previous month replayed against a budget while it is typed, and a limit that would have fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _

from billing.currencies.amounts import FEMTO_A_NANO, MAX_BUDGET, MILLIONTHS, nano_a_cent
from frontend.core.gauges import percent
from frontend.core.languages import day_text
from frontend.core.lists import with_query
from frontend.core.numbers import exact, page_currency
from frontend.tenant.budgets.amounts import BudgetAmount, input_text
from frontend.tenant.budgets.scopes import BudgetOwnerScope
from millrace.apps.policy_results.budget_replays import BudgetReplay, replay_budget

_SPARE = 110  # percent of the month's peak: the suggested limit


@dataclass(frozen=True)
class ReplayBar:
    """A day in the drawing. Numbers are percent of the drawing's width and height."""

    x: str
    accepted_y: str
    accepted: str
    rejected_y: str
    rejected: str


@dataclass(frozen=True)
class BudgetReplayView:
    """The replay for the template. `limit_y` is empty if the limit is above the drawing or unknown."""

    month: str
    headline: str
    kind: str  # "bad" if requests are rejected
    text: str
    label: str  # label of the drawing
    used: BudgetAmount
    rejected: BudgetAmount | None
    bars: Sequence[ReplayBar]
    width: str
    limit_y: str
    passed: Sequence[tuple[int, datetime]]
    suggestion: BudgetAmount | None
    suggestion_url: str
    is_daily: bool


def month_replay(
    tenant_id: int,
    owner: BudgetOwnerScope,
    unit: str,
    period: str,
    mode: str,
    limit: int | None,
    thresholds: Sequence[int],
    url: str,
    typed: Mapping[str, str],
) -> BudgetReplayView:
    """Return the replay of a budget as typed so far. Call inside the tenant's scope.

    `limit` is None if no valid amount is typed. `url` is the page of the form, which `typed` fills.
    """
    found = replay_budget(owner.scope(tenant_id), unit, period, limit, thresholds)
    month = day_text(found.start.astimezone(found.zone), "F")
    headline, text = _result(found, month, mode, limit)
    whole = None if limit is None else BudgetAmount.from_units(unit, limit)
    fits = whole is not None and whole.millionths * 100 >= _amount(unit, found.peak).millionths * _SPARE
    suggestion = None if fits or not found.peak else BudgetAmount.from_units(unit, _suggest_limit(unit, found.peak))
    rejected = _amount(unit, found.rejected_amount) if found.rejected_amount else None
    used = _amount(unit, found.used)
    scale = max(found.peak, min(_native(unit, limit), 2 * found.peak) if limit is not None else 0, 1)
    label = _("%(month)s by day: %(used)s used") % {"month": month, "used": used.text}
    if whole is not None:
        label += _(", against a limit of %(whole)s") % {"whole": whole.text}
    return BudgetReplayView(
        month=month,
        headline=headline,
        kind="bad" if found.rejected_amount and mode == "hard" else "",
        text=text,
        label=f"{label}. {headline}",
        used=used,
        rejected=rejected,
        bars=_bars(found, scale),
        width=percent(4, 5 * len(found.days)),
        limit_y=_from_top(_native(unit, limit), scale) if limit and _native(unit, limit) <= scale else "",
        passed=[(share, at) for share, at in found.passed if share < 100 or mode != "hard"],
        suggestion=suggestion,
        suggestion_url=with_query(url, **{**typed, "amount": input_text(_suggest_limit(unit, found.peak), unit)})
        if suggestion
        else "",
        is_daily=period == "day",
    )


def _result(found: BudgetReplay, month: str, mode: str, limit: int | None) -> tuple[str, str]:
    """Return the headline and its explanation."""
    if not found.used:
        return _("No usage in %(month)s.") % {"month": month}, _("The replay needs a month of usage.")
    if limit is None:
        return _("Usage in %(month)s.") % {"month": month}, _("Type a limit to replay it on this month.")
    if not found.rejected_amount:
        return _("Not reached in %(month)s.") % {"month": month}, _("All %(requests)s requests would have passed.") % {
            "requests": exact(found.requests)
        }
    last = len(found.days) - found.reached_days
    part = (
        _("on every day")
        if not last
        else _("on %(reached_days)s of %(days)s days") % {"reached_days": found.reached_days, "days": len(found.days)}
    )
    requests = _("≈ %(rejected)s of %(requests)s requests") % {
        "rejected": exact(found.rejected),
        "requests": exact(found.requests),
    }
    verb = _("would have been rejected") if mode == "hard" else _("would have been over the limit")
    return _("Reached in %(month)s, %(part)s.") % {"month": month, "part": part}, f"{requests} {verb}."


def _amount(unit: str, native: int) -> BudgetAmount:
    return BudgetAmount(unit, native if unit == "money" else native * MILLIONTHS)


def _native(unit: str, whole: int | None) -> int:
    """Return nano-USD as femto-USD; tokens and requests unchanged."""
    return (whole or 0) * FEMTO_A_NANO if unit == "money" else whole or 0


def _suggest_limit(unit: str, peak: int) -> int:
    """Return a limit with two significant digits that exceeds the peak by a tenth, in whole units."""
    wanted = -(-peak * _SPARE // (100 * (FEMTO_A_NANO if unit == "money" else 1)))
    step = int(10 ** max(0, len(str(wanted)) - 2))
    if unit == "money":
        step = max(step, nano_a_cent(page_currency()))  # whole cents
    return min(-(-wanted // step) * step, MAX_BUDGET)


def _bars(found: BudgetReplay, scale: int) -> list[ReplayBar]:
    days = len(found.days)
    return [
        ReplayBar(
            percent(place, days),
            _from_top(day.accepted, scale),
            percent(day.accepted, scale),
            _from_top(day.accepted + day.rejected, scale),
            percent(day.rejected, scale),
        )
        for place, day in enumerate(found.days)
    ]


def _from_top(value: int, scale: int) -> str:
    return percent(scale - min(value, scale), scale)
