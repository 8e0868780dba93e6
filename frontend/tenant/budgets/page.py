"""The budgets page: the tree of budgets, and notices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.translation import gettext as _

from billing.models import Budget, BudgetAlert, BudgetPeriod
from billing.models.budgets import current_periods
from frontend.core.gauges import Gauge, Mark, percent
from frontend.core.languages import day_text, in_sentence
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import share
from frontend.core.page_context import PageContext
from frontend.core.screens import MAX_RESULTS_PER_KIND, SearchResult
from frontend.tenant.budgets.amounts import BudgetAmount
from frontend.tenant.budgets.scopes import ACCOUNT, BudgetOwnerScope, owner_of
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
from tenants.permissions import Permission

MAX_BUDGETS = 300  # budgets in the tree
RECENT = timedelta(hours=1)
FULL_AT = 99  # percent; the rest is too small for most requests
NEAR_AT = 80
_MIN_LABEL_DISTANCE = 12  # minimum distance of two labels, in percent of the gauge
PERIODS = {"day": _lazy("daily"), "month": _lazy("monthly"), "lifetime": _lazy("in total")}
MODES = {"hard": _lazy("Blocks"), "soft": _lazy("Alerts only"), "dry_run": _lazy("Dry run")}


@dataclass(frozen=True)
class BudgetUsage:
    """The status of a budget in the current period."""

    budget: Budget
    budget_period: BudgetPeriod | None
    used: BudgetAmount
    reserved: BudgetAmount
    limit: BudgetAmount
    raised: BudgetAmount | None  # temporary raise, included in `limit`
    rolled_over: BudgetAmount | None

    @property
    def left(self) -> BudgetAmount:
        return BudgetAmount(
            self.limit.unit, max(0, self.limit.millionths - self.used.millionths - self.reserved.millionths)
        )

    @property
    def is_hard(self) -> bool:
        return self.budget.mode == Budget.Mode.HARD

    @property
    def is_full(self) -> bool:
        return self.used.millionths * 100 >= self.limit.millionths * FULL_AT

    @property
    def is_near(self) -> bool:
        return self.used.millionths * 100 >= self.limit.millionths * NEAR_AT

    @property
    def share(self) -> str:
        """The used part of the limit."""
        return share(self.used.millionths, self.limit.millionths) if self.limit.millionths else share(1, 1)

    @property
    def mode(self) -> str:
        return MODES[self.budget.mode] if self.budget.active else _("Removed")

    @property
    def mode_kind(self) -> str:
        """The color of the mode's badge."""
        if not self.is_hard or not self.budget.active:
            return ""
        return "bad" if self.is_full else "info"

    @property
    def period(self) -> str:
        return PERIODS[self.budget.period]

    @property
    def ends(self) -> datetime | None:
        return self.budget_period.period_end if self.budget_period else None


def budget_statuses(ctx: PageContext) -> list[BudgetUsage]:
    """Return the status of every active budget, loaded once per page. Call inside `ctx.scope()`."""

    def find() -> list[BudgetUsage]:
        rows = Budget.objects.for_tenant(ctx.tenant).filter(active=True)
        return statuses_of(
            ctx, list(rows.select_related("project", "key__project", "member").order_by("pk")[: MAX_BUDGETS + 1])
        )

    return ctx.once("standings", find)


def statuses_of(ctx: PageContext, budgets: list[Budget]) -> list[BudgetUsage]:
    """Return the current status of the budgets."""
    budget_periods = current_periods(ctx.tenant.pk, budgets, ctx.now)
    return [_status_of(budget, budget_periods.get(budget.pk), ctx.now) for budget in budgets]


def _status_of(budget: Budget, budget_period: BudgetPeriod | None, now: datetime) -> BudgetUsage:
    at = budget_period or BudgetPeriod(used=0, rolled_over=0, reserved=0)
    raised = budget.active_increase(now)
    return BudgetUsage(
        budget,
        budget_period,
        BudgetAmount(budget.unit, int(at.used)),
        BudgetAmount.from_units(budget.unit, at.reserved),
        BudgetAmount.from_units(budget.unit, budget.limit_in(at, now)),
        BudgetAmount.from_units(budget.unit, raised) if raised else None,
        BudgetAmount.from_units(budget.unit, at.rolled_over) if at.rolled_over else None,
    )


def tree(ctx: PageContext) -> dict[str, Any]:
    """Return the organization, its projects with their keys, and its members, with the budgets of each."""
    found = budget_statuses(ctx)
    sent: defaultdict[int, set[str]] = defaultdict(set)
    budget_periods = [status.budget_period.pk for status in found if status.budget_period]
    for row in BudgetAlert.objects.for_tenant(ctx.tenant).filter(budget_period_id__in=budget_periods):
        sent[row.budget_id].add(row.threshold)
    rows: defaultdict[tuple[str, ...], list[BudgetUsage]] = defaultdict(list)
    owners: dict[tuple[str, ...], BudgetOwnerScope] = {("",): BudgetOwnerScope(ACCOUNT)}
    for status in found[:MAX_BUDGETS]:
        owner = owner_of(status.budget)
        place = _tree_path(owner)
        owners[place] = owner
        if owner.kind == "key":
            owners.setdefault(place[:2], BudgetOwnerScope("project", owner.row.project))
        rows[place].append(status)
    nodes = [
        {
            "owner": owner,
            "label": owner.label if owner.kind != "key" else owner.row.name,
            "icon": {"project": "layers", "key": "keys", "member": "user"}.get(owner.kind, "tenants"),
            "depth": len(place) - 1,
            "rows": [_row(ctx, status, sent[status.budget.pk]) for status in rows[place]],
        }
        for place, owner in sorted(owners.items(), key=lambda item: item[0])
    ]
    return {"nodes": nodes if found else (), "is_cut": len(found) > MAX_BUDGETS}


def _tree_path(owner: BudgetOwnerScope) -> tuple[str, ...]:
    """Return the sort key of an owner in the tree: the names of its parents, then its own."""
    if owner.kind == "project":
        return ("a", f"{owner.row.name} {owner.row.pk}")
    if owner.kind == "key":
        project = owner.row.project
        return ("a", f"{project.name} {project.pk}", f"{owner.row.name} {owner.row.pk}")
    if owner.kind == "member":
        return ("b", f"{owner.row.email}")
    return ("",)


def _row(ctx: PageContext, status: BudgetUsage, sent: set[str]) -> dict[str, Any]:
    """Return a budget in the tree. Widths are percentages for the meter."""
    budget, whole = status.budget, status.limit.millionths
    notes = []
    if status.raised and budget.increase_expires_at:
        notes.append(
            _("%(raised)s more until %(zone)s")
            % {
                "raised": status.raised.text,
                "zone": day_text(budget.increase_expires_at.astimezone(ctx.zone), "j M H:i"),
            }
        )
    if status.rolled_over:
        notes.append(_("%(rolled_over)s rolled over") % {"rolled_over": status.rolled_over.text})
    if budget.reduce_max_tokens:
        notes.append(_("Reduces max_tokens to fit"))
    return {
        "status": status,
        "used_width": percent(status.used.millionths, whole),
        "taken_width": percent(status.used.millionths + status.reserved.millionths, whole),
        "level": "over" if status.is_full else "near" if status.is_near else "fill",
        "notes": notes,
        "thresholds": [(threshold, str(threshold) in sent) for threshold in budget.thresholds],
        "refused": status.budget_period.rejected if status.budget_period and budget.mode == Budget.Mode.DRY_RUN else 0,
    }


def gauge(status: BudgetUsage, sent: set[str]) -> Gauge:
    """Return the gauge of the used and reserved parts, with a scale that ends a little past the limit."""
    used, whole = status.used.millionths, status.limit.millionths
    scale = max(whole * 17 // 15, used + status.reserved.millionths, 1)
    marks = [Mark(percent(whole, scale), _("Limit %(limit)s") % {"limit": status.limit.text}, is_limit=True)]
    for threshold in status.budget.thresholds:
        if threshold < 100:
            place = percent(whole * threshold // 100, scale)
            near = any(mark.label and abs(float(place) - float(mark.at)) < _MIN_LABEL_DISTANCE for mark in marks)
            marks.append(Mark(place, "" if near else f"{threshold}%" + (", sent" if str(threshold) in sent else "")))
    label = _("%(used)s used and %(reserved)s reserved of %(limit)s") % {
        "used": status.used.text,
        "reserved": status.reserved.text,
        "limit": status.limit.text,
    }
    return Gauge(percent(used, scale), percent(used + status.reserved.millionths, scale), tuple(marks), label)


def _needed_amounts(ctx: PageContext) -> dict[int, int]:
    """Return what the latest rejected request of each budget needed in the last hour, in whole units."""
    rows = RequestRecord.objects.for_tenant(ctx.tenant).filter(
        outcome=RequestOutcome.LIMITED, started_at__gte=ctx.now - RECENT, limited_by__kind="budget"
    )
    newest = rows.order_by("-started_at").values_list("limited_by", flat=True)[:MAX_BUDGETS]
    return {bound["id"]: bound["needed"] for bound in reversed(newest) if bound}


def notices(ctx: PageContext) -> list[dict[str, Any]]:
    """Return hard budgets that are full or rejected the latest request, with the time of their reset."""
    needed = _needed_amounts(ctx)
    found = []
    for status in budget_statuses(ctx):
        short = BudgetAmount.from_units(status.budget.unit, needed.get(status.budget.pk, 0))
        if status.is_hard and (status.is_full or short.millionths > status.left.millionths):
            ends = status.ends and status.ends.astimezone(ctx.zone)
            message = _("%(used)s of %(limit)s used.") % {"used": status.used.text, "limit": status.limit.text}
            if not status.is_full:
                message = _("%(left)s left. The latest request needed up to %(short)s.") % {
                    "left": status.left.text,
                    "short": short.text,
                }
            code = "429 budget_exceeded" if status.budget.unit == "money" else "429 quota_exceeded"
            sentence = _rejection_sentence(is_full=status.is_full, has_end=bool(ends)) % {
                "message": message,
                "owner_text": _owner_text(status.budget),
                "code": code,
                "ends": day_text(ends, "j F, H:i") if ends else "",
            }
            text, _code, after = sentence.partition(code)
            found.append(
                {
                    "budget": status.budget,
                    "title": f"{status.budget.name}: "
                    + (_("hard limit reached.") if status.is_full else _("requests are rejected.")),
                    "text": text,
                    "code": code,
                    "after": after,
                }
            )
    return found[:5]


def _rejection_sentence(*, is_full: bool, has_end: bool) -> str:
    if is_full and has_end:
        return _(
            "%(message)s Requests of %(owner_text)s receive %(code)s until %(ends)s, or until you raise the limit."
        )
    if is_full:
        return _("%(message)s Requests of %(owner_text)s receive %(code)s until you raise the limit.")
    if has_end:
        return _(
            "%(message)s Requests of %(owner_text)s receive %(code)s if they exceed the remaining budget, until"
            " %(ends)s or until you raise the limit."
        )
    return _(
        "%(message)s Requests of %(owner_text)s receive %(code)s if they exceed the remaining budget, until you raise"
        " the limit."
    )


def _owner_text(budget: Budget) -> str:
    owner = owner_of(budget)
    return _("the organization") if owner.row is None else in_sentence(owner.label)


def find_raises(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield the action "Raise budget" for each active budget whose name has the rest of the typed text."""
    words = typed.lower().split()
    if not (ctx.may(Permission.LIMITS_WRITE) and words and _("raise budget").startswith(words[0])):
        return
    rows = Budget.objects.for_tenant(ctx.tenant).filter(active=True).order_by("name", "pk")
    rest = " ".join(words[1:]).removeprefix("budget").strip()
    for row in rows.filter(name__icontains=rest)[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(_("Raise budget %(name)s") % {"name": row.name}, ctx.url("budgets-raise", row.pk), "up")
