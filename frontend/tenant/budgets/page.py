"""The tree of budgets, the sets of limits, and the history of alerts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q

from billing.budgets.alerts import budget_status
from billing.models import Budget, BudgetAlert, BudgetPeriod
from frontend.core.gauges import Gauge, Mark, percent
from frontend.core.page_context import PageContext
from frontend.tenant.budgets.amounts import BudgetAmount
from frontend.tenant.budgets.scopes import ACCOUNT, BudgetOwnerScope, whose
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
from tenants.permissions import Permission

MOST = 300  # budgets in the tree
LATELY = timedelta(hours=1)
FULL_AT = 99  # percent: what is left then fits hardly any request
NEAR_AT = 80
_APART = 12  # percent of the gauge that two labels need between them
PERIODS = {"day": "daily", "month": "monthly", "lifetime": "in total"}
MODES = {"hard": "Blocks", "soft": "Alerts only", "dry_run": "Dry run"}


@dataclass(frozen=True)
class BudgetPageStatus:
    """How a budget stands in the period under way."""

    budget: Budget
    budget_period: BudgetPeriod | None
    used: BudgetAmount
    reserved: BudgetAmount
    limit: BudgetAmount
    raised: BudgetAmount | None  # for now, in the limit
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
    def percent(self) -> int:
        return self.used.millionths * 100 // self.limit.millionths if self.limit.millionths else 100

    @property
    def ends(self) -> datetime | None:
        return self.budget_period.period_end if self.budget_period else None


@dataclass(frozen=True)
class Threshold:
    percent: int
    sent: bool


@dataclass(frozen=True)
class BudgetTreeRow:
    """A budget in the tree. Widths are in percent, for the meter."""

    name: str
    url: str
    raise_url: str
    edit_url: str
    mode: str
    mode_kind: str
    used: BudgetAmount
    reserved: BudgetAmount
    left: BudgetAmount
    limit: BudgetAmount
    percent: int
    used_width: str
    taken_width: str
    level: str
    period: str
    resets_at: datetime | None
    notes: tuple[str, ...]
    thresholds: tuple[Threshold, ...]
    refused: int  # would have been, lately: of those on trial


@dataclass(frozen=True)
class Node:
    """Whose the budgets below are."""

    label: str
    icon: str
    depth: int
    rows: tuple[BudgetTreeRow, ...]
    new_url: str


@dataclass(frozen=True)
class Tree:
    nodes: tuple[Node, ...]
    new_url: str
    is_cut: bool


@dataclass(frozen=True)
class BudgetNotice:
    kind: str
    title: str
    text: str
    code: str
    after: str
    raise_url: str


@dataclass(frozen=True)
class BudgetNotices:
    notices: tuple[BudgetNotice, ...]


def limit_statuses(visit: PageContext) -> list[BudgetPageStatus]:
    """Every budget as it stands, asked once a page. In the visit's scope."""

    def find() -> list[BudgetPageStatus]:
        rows = Budget.objects.for_tenant(visit.tenant).filter(active=True)
        return stand(visit, list(rows.select_related("project", "key__project", "member").order_by("pk")[: MOST + 1]))

    return visit.once("standings", find)


def stand(visit: PageContext, budgets: list[Budget]) -> list[BudgetPageStatus]:
    """How budgets stand now."""
    under_way = Q(period_start__lte=visit.now) & (Q(period_end__gt=visit.now) | Q(period_end=None))
    rows = BudgetPeriod.objects.for_tenant(visit.tenant).filter(under_way, budget_id__in=[one.pk for one in budgets])
    budget_periods = {row.budget_id: row for row in rows}
    return [_stand(one, budget_periods.get(one.pk), visit.now) for one in budgets]


def _stand(budget: Budget, budget_period: BudgetPeriod | None, now: datetime) -> BudgetPageStatus:
    at = budget_period or BudgetPeriod(used=0, rolled_over=0, reserved=0)
    raised = (
        budget.temporary_increase if budget.increase_expires_at is not None and budget.increase_expires_at > now else 0
    )
    return BudgetPageStatus(
        budget,
        budget_period,
        BudgetAmount(budget.unit, int(at.used)),
        BudgetAmount.whole(budget.unit, at.reserved),
        BudgetAmount.whole(budget.unit, budget_status(budget, at, now).limit),
        BudgetAmount.whole(budget.unit, raised) if raised else None,
        BudgetAmount.whole(budget.unit, at.rolled_over) if at.rolled_over else None,
    )


def tree(visit: PageContext) -> Tree:
    """Return the account, its projects and their keys, and its members, with the budgets of each."""
    found = limit_statuses(visit)
    sent: defaultdict[int, set[str]] = defaultdict(set)
    budget_periods = [one.budget_period.pk for one in found if one.budget_period]
    for row in BudgetAlert.objects.for_tenant(visit.tenant).filter(budget_period_id__in=budget_periods):
        sent[row.budget_id].add(row.threshold)
    writes = visit.may(Permission.LIMITS_WRITE)
    rows: defaultdict[tuple[str, ...], list[BudgetPageStatus]] = defaultdict(list)
    owners: dict[tuple[str, ...], BudgetOwnerScope] = {("",): BudgetOwnerScope(ACCOUNT)}
    for one in found[:MOST]:
        owner = whose(one.budget)
        place = _place(owner)
        owners[place] = owner
        if owner.kind == "key":
            owners.setdefault(place[:2], BudgetOwnerScope("project", owner.row.project))
        rows[place].append(one)
    nodes = [
        Node(
            owner.label if owner.kind != "key" else owner.row.name,
            {"project": "layers", "key": "keys", "member": "user"}.get(owner.kind, "tenants"),
            len(place) - 1,
            tuple(_row(visit, one, sent[one.budget.pk], writes=writes) for one in rows[place]),
            f"{visit.url('budgets-new')}?whose={owner.value}" if writes else "",
        )
        for place, owner in sorted(owners.items(), key=lambda each: each[0])
    ]
    shown = tuple(nodes) if found else ()
    return Tree(shown, visit.url("budgets-new") if writes else "", len(found) > MOST)


def _place(owner: BudgetOwnerScope) -> tuple[str, ...]:
    """Where it stands in the tree: its parents first."""
    if owner.kind == "project":
        return ("a", f"{owner.row.name} {owner.row.pk}")
    if owner.kind == "key":
        project = owner.row.project
        return ("a", f"{project.name} {project.pk}", f"{owner.row.name} {owner.row.pk}")
    if owner.kind == "member":
        return ("b", f"{owner.row.email}")
    return ("",)


def _row(visit: PageContext, one: BudgetPageStatus, sent: set[str], *, writes: bool) -> BudgetTreeRow:
    budget, whole = one.budget, one.limit.millionths
    notes = []
    if one.raised and budget.increase_expires_at:
        notes.append(f"{one.raised.text} more until {budget.increase_expires_at.astimezone(visit.zone):%-d %b %H:%M}")
    if one.rolled_over:
        notes.append(f"{one.rolled_over.text} rolled over")
    if budget.reduce_max_tokens:
        notes.append("Reduces max_tokens to fit")
    return BudgetTreeRow(
        name=budget.name,
        url=visit.url("budgets-detail", budget.pk),
        raise_url=visit.url("budgets-raise", budget.pk) if writes else "",
        edit_url=visit.url("budgets-edit", budget.pk) if writes else "",
        mode=MODES[budget.mode],
        mode_kind=mode_kind(one),
        used=one.used,
        reserved=one.reserved,
        left=one.left,
        limit=one.limit,
        percent=one.percent,
        used_width=percent(one.used.millionths, whole),
        taken_width=percent(one.used.millionths + one.reserved.millionths, whole),
        level="over" if one.is_full else "near" if one.percent >= NEAR_AT else "fill",
        period=PERIODS[budget.period],
        resets_at=one.ends,
        notes=tuple(notes),
        thresholds=tuple(Threshold(each, str(each) in sent) for each in budget.thresholds),
        refused=one.budget_period.rejected if one.budget_period and budget.mode == Budget.Mode.DRY_RUN else 0,
    )


def mode_kind(one: BudgetPageStatus) -> str:
    if not one.is_hard:
        return ""
    return "bad" if one.is_full else "info"


def gauge(one: BudgetPageStatus, sent: set[str]) -> Gauge:
    """Return the gauge of the used and reserved parts, with a scale that ends a little past the limit."""
    used, whole = one.used.millionths, one.limit.millionths
    scale = max(whole * 17 // 15, used + one.reserved.millionths, 1)
    marks = [Mark(percent(whole, scale), f"Limit {one.limit.text}", is_limit=True)]
    for each in one.budget.thresholds:
        if each < 100:
            place = percent(whole * each // 100, scale)
            near = any(mark.label and abs(float(place) - float(mark.at)) < _APART for mark in marks)
            marks.append(Mark(place, "" if near else f"{each}%" + (", sent" if str(each) in sent else "")))
    label = f"{one.used.text} used and {one.reserved.text} reserved of {one.limit.text}"
    return Gauge(percent(used, scale), percent(used + one.reserved.millionths, scale), tuple(marks), label)


def _needed(visit: PageContext) -> dict[int, int]:
    """Budgets that refused a request in the last hour, with what the latest one needed, in whole units."""
    rows = RequestRecord.objects.for_tenant(visit.tenant).filter(
        outcome=RequestOutcome.LIMITED, started_at__gte=visit.now - LATELY, limited_by__kind="budget"
    )
    newest = rows.order_by("-started_at").values_list("limited_by", flat=True)[:MOST]
    return {bound["id"]: bound["needed"] for bound in reversed(newest) if bound}


def notices(visit: PageContext) -> BudgetNotices:
    """Hard budgets that are full, or refused the latest request and would again: until when, and a way out."""
    writes = visit.may(Permission.LIMITS_WRITE)
    needed = _needed(visit)
    found = []
    for one in limit_statuses(visit):
        short = BudgetAmount.whole(one.budget.unit, needed.get(one.budget.pk, 0))
        if one.is_hard and (one.is_full or short.millionths > one.left.millionths):
            ends = one.ends and one.ends.astimezone(visit.zone)
            until = f" until {ends:%-d %B, %H:%M}, or until you raise it." if ends else " until you raise it."
            said = f"{one.used.text} of {one.limit.text} used."
            if not one.is_full:
                said = f"{one.left.text} left. The latest request needed up to {short.text}."
            found.append(
                BudgetNotice(
                    "bad",
                    f"{one.budget.name}: {'hard limit reached' if one.is_full else 'requests are rejected'}.",
                    f"{said} Requests of {_of(one.budget)} receive",
                    f"429 {'budget' if one.budget.unit == 'money' else 'quota'}_exceeded",
                    until if one.is_full else f" if they exceed the remaining budget,{until}",
                    visit.url("budgets-raise", one.budget.pk) if writes else "",
                )
            )
    return BudgetNotices(tuple(found[:5]))


def _of(budget: Budget) -> str:
    owner = whose(budget)
    return "the organization" if owner.row is None else owner.label[0].lower() + owner.label[1:]
