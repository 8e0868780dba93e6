"""The cost explorer: one measure by segment, over time and in a table, compared with the previous period."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta
from typing import Any

from django.utils.translation import gettext as _

from billing.metering.end_users import MAX_END_USERS
from billing.metering.segments import Dimension
from billing.metering.usage import TooManyRows
from frontend.core.backend_messages import translate_message
from frontend.core.chart_marks import marks_of
from frontend.core.charts import Chart, Series, Unit, format_value
from frontend.core.date_ranges import DateRange, date_range_of
from frontend.core.filter_chips import FilterBar, choice_chip, filter_bar, text_chip
from frontend.core.languages import day_text, in_sentence
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import Choice, changed_url, key_creators, number_param, text_param, with_query
from frontend.core.numbers import Money, common_places, exact, share
from frontend.core.page_context import PageContext
from frontend.tenant.overview.usage import Delta, delta_of
from frontend.tenant.usage.query import usage_chips
from millrace.apps.request_log.cost_segments import (
    Amount,
    Measure,
    SegmentQuery,
    Segments,
    find_segments,
    segment_labels,
)
from millrace.apps.request_log.segment_files import SegmentFile, Step, by_step, steps_between
from millrace.apps.request_log.segment_jobs import MAX_DIRECT_CELLS, exports_of
from tenants.models import ApiKey

COLORS = ("s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9", "s10")  # the last one is that of all others
LARGEST = len(COLORS) - 1  # segments that are shown one by one
MAX_DAILY = 45  # days that can be shown one by one
MEASURES: Mapping[Measure, str] = {
    "cost": _lazy("Cost"),
    "tokens": _lazy("Tokens"),
    "requests": _lazy("Accepted requests"),
    "success": _lazy("Cost per success"),
}
DIMENSIONS: Mapping[Dimension, str] = {
    "model": _lazy("Model"),
    "key": _lazy("API key"),
    "project": _lazy("Project"),
    "member": _lazy("Member"),
    "end_user": _lazy("End user"),
}
STEPS: Mapping[Step, str] = {"day": _lazy("Daily"), "week": _lazy("Weekly")}
VIEWS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (_lazy("Cost by model"), {}),
    (_lazy("Cost by API key"), {"group": "key"}),
    (_lazy("Tokens by project"), {"measure": "tokens", "group": "project"}),
    (_lazy("Cost per success"), {"measure": "success"}),
)
_DEFAULTS = {"measure": "cost", "group": "model", "step": "day"}
_UNITS: Mapping[Measure, Unit] = {"cost": "usd", "tokens": "tokens", "requests": "count", "success": "usd"}
# The parameter that filters by a segment, and the grouping that shows what the segment consists of.
_FILTERS: Mapping[Dimension, tuple[str, Dimension]] = {
    "model": ("model", "key"),
    "key": ("key", "model"),
    "project": ("project", "key"),
    "member": ("member", "key"),
    "end_user": ("user", "model"),
}
_REQUEST_FILTERS = ("model", "key", "project", "member", "user")  # filters of the request log too


@dataclass(frozen=True)
class ExplorerQuery:
    """The question in the query string."""

    date_range: DateRange
    step: Step
    compares: bool
    asked: SegmentQuery

    @property
    def previous(self) -> SegmentQuery | None:
        """The same question about the previous period."""
        if not self.compares:
            return None
        start, end = self.date_range.previous
        return replace(self.asked, start=start, end=end)

    @property
    def file(self) -> SegmentFile:
        return SegmentFile(self.asked, self.date_range.end, self.step, self.previous)


@dataclass(frozen=True)
class SegmentRow:
    """A row of the table. `kind` is the color. Without a URL, it is no single segment."""

    kind: str
    name: str
    detail: str
    url: str
    requests_url: str
    amount: int | None
    part: str
    previous: int | None
    delta: Delta | None

    @property
    def money(self) -> Money | None:
        return None if self.amount is None else Money(self.amount)

    @property
    def previous_money(self) -> Money | None:
        return None if self.previous is None else Money(self.previous)


def query_of(ctx: PageContext) -> ExplorerQuery:
    """Return the query in the URL. Invalid values are ignored. Call inside `ctx.scope()`."""
    return ctx.once("explorer query", lambda: _read_query(ctx))


def _read_query(ctx: PageContext) -> ExplorerQuery:
    date_range = date_range_of(ctx, with_weeks=True)
    member = number_param(ctx, "member")
    keys = None if member is None else ApiKey.objects.for_tenant(ctx.tenant).filter(created_by=member)
    asked = SegmentQuery(
        ctx.tenant.pk,
        next((name for name in MEASURES if name == ctx.query.get("measure")), "cost"),
        next((name for name in DIMENSIONS if name == ctx.query.get("group")), "model"),
        date_range.start,
        None if date_range.end >= ctx.now else date_range.end,
        text_param(ctx, "model", 128) or None,
        number_param(ctx, "key"),
        number_param(ctx, "project"),
        None if keys is None else tuple(keys.order_by("pk").values_list("pk", flat=True)),
        text_param(ctx, "user", 128) or None,
    )
    wanted: Step = next((name for name in STEPS if name == ctx.query.get("step")), "day")
    is_long = date_range.end - date_range.start > MAX_DAILY * timedelta(days=1)
    return ExplorerQuery(date_range, "week" if is_long else wanted, ctx.query.get("compare") != "off", asked)


def filters(ctx: PageContext) -> FilterBar:
    """Return the filter chips. Call inside `ctx.scope()`."""
    url, asked = ctx.url("usage-explorer"), query_of(ctx).asked
    more = (
        choice_chip(ctx, url, "member", _("Member"), key_creators(ctx), number_param(ctx, "member")),
        text_chip(ctx, url, "user", _("End user"), most=128),
    )
    return filter_bar(ctx, url, (*usage_chips(ctx, url, asked.usage), *more))


def controls(ctx: PageContext) -> dict[str, Any]:
    """Return the links that change the question."""
    now, url = query_of(ctx), ctx.url("usage-explorer")

    def choices(name: str, labels: Mapping[Any, str], current: str) -> list[Choice]:
        default = _DEFAULTS[name]
        return [
            Choice(label, changed_url(ctx, url, **{name: "" if value == default else value}), value == current)
            for value, label in labels.items()
        ]

    is_long = now.date_range.end - now.date_range.start > MAX_DAILY * timedelta(days=1)
    steps = {"week": STEPS["week"]} if is_long else STEPS
    return {
        "measures": choices("measure", MEASURES, now.asked.measure),
        "dimensions": choices("group", DIMENSIONS, now.asked.dimension),
        "steps": choices("step", steps, now.step),
        "compares": now.compares,
        "compare_url": changed_url(ctx, url, compare="off" if now.compares else ""),
    }


def is_by_request(ctx: PageContext) -> bool:
    """Return whether the panel reads each request of the period, because there are no sums of them."""
    is_filtered = any(ctx.query.get(name) for name in ("key", "member", "user"))
    is_grouped = ctx.query.get("group") in ("key", "member", "end_user")
    return ctx.query.get("measure") == "success" and (is_filtered or is_grouped)


def explorer(ctx: PageContext) -> dict[str, Any]:
    """Return the chart and the table, or the reason why there are none."""
    now = query_of(ctx)
    panel: dict[str, Any] = {
        "measure": MEASURES[now.asked.measure],
        "dimension": DIMENSIONS[now.asked.dimension],
        "date_range": now.date_range,
        "is_money": _UNITS[now.asked.measure] == "usd",
        "csv_url": "",
        "job_url": "",
        "reason": "",
        "rows": (),
    }
    try:
        found = find_segments(now.asked, largest=LARGEST)
        before = find_segments(now.previous, chosen=found.names) if now.previous else None
    except TooManyRows:
        return panel | {"reason": "too_many"}
    if not found.days:
        return panel | {"reason": "before" if now.date_range.end <= ctx.tenant.created_at else "nothing"}
    panel |= _export(ctx, now, found)
    rows, total = _rows(ctx, now, found, before)
    if not any(row.amount for row in rows):
        return panel | {"reason": "no_success" if now.asked.measure == "success" else "zero"}
    shown = [*rows, total]
    return panel | {
        "rows": rows,
        "total": total,
        "compares": before is not None,
        "previous_label": _period_text(now.date_range.previous, now.date_range),
        "most_end_users": MAX_END_USERS if now.asked.dimension == "end_user" else 0,
        "has_parts": now.asked.measure != "success",
        "all": sum(row.amount or 0 for row in rows),
        "places": common_places(row.money for row in shown),
        "previous_places": common_places(row.previous_money for row in shown),
        "chart": _with_details(ctx, now, _chart(now, found, before, rows, total)),
    }


def _export(ctx: PageContext, now: ExplorerQuery, found: Segments) -> dict[str, Any]:
    """Return the URL of the CSV, or of the form that starts the job which writes it."""
    if now.file.count_cells(found.count) <= MAX_DIRECT_CELLS:
        return {"csv_url": with_query(ctx.url("usage-explorer-csv"), **ctx.query), "job_url": ""}
    is_member = ctx.access is not None and ctx.access.role is not None
    job_url = with_query(ctx.url("usage-explorer-exports"), **ctx.query) if is_member else ""
    return {"csv_url": "", "job_url": job_url}


def file_name(ctx: PageContext) -> str:
    """Return the name of the CSV."""
    now = query_of(ctx)
    dates = f"{now.date_range.first}-{now.date_range.last}"
    return f"{now.asked.measure}-{ctx.tenant.slug}-by-{now.asked.dimension}-{dates}.csv"


def exports(ctx: PageContext) -> dict[str, Any]:
    """Return the exports of the last day that jobs write."""
    rows = [(job, translate_message(job.error) if job.error else "") for job in exports_of(ctx.tenant)]
    return {"rows": rows}


def _period_text(period: tuple[datetime, datetime], date_range: DateRange) -> str:
    first = period[0].astimezone(date_range.zone)
    last = (period[1] - timedelta(microseconds=1)).astimezone(date_range.zone)
    return f"{day_text(first, 'j M' if first.year == last.year else 'j M Y')} – {day_text(last)}"


def _rows(
    ctx: PageContext, now: ExplorerQuery, found: Segments, before: Segments | None
) -> tuple[list[SegmentRow], SegmentRow]:
    """Return the row of each segment, with one of all others, and the row of all together."""
    dimension = now.asked.dimension
    labels = segment_labels(ctx.tenant.pk, dimension, found.names)
    whole = found.total.value

    def make_row(
        kind: str, texts: tuple[str, str], urls: tuple[str, str], amount: Amount, then: Amount | None
    ) -> SegmentRow:
        figure, previous = amount.figure, None if then is None else then.figure
        delta = None if figure is None or not previous else delta_of(figure, previous, _good_when_down(now))
        return SegmentRow(kind, *texts, *urls, figure, share(amount.value, whole), previous, delta)

    rows = [
        make_row(
            COLORS[number],
            labels.get(name) or _unknown(dimension, name),
            (_filter_url(ctx, dimension, name), _requests_url(ctx, dimension, name)),
            found.total_of(name),
            before.total_of(name) if before else None,
        )
        for number, name in enumerate(found.names)
    ]
    gone = before.total_of(None) if before else None
    if None in found.days or (gone is not None and gone.value):
        text = _("Others (%(count)s)") % {"count": exact(found.others)} if found.others > 0 else _("Others")
        rows.append(make_row(COLORS[LARGEST], (text, ""), ("", ""), found.total_of(None), gone))
    return rows, make_row("", (_("All"), ""), ("", ""), found.total, before.total if before else None)


def _good_when_down(now: ExplorerQuery) -> Any:
    return "good" if _UNITS[now.asked.measure] == "usd" else ""


def _unknown(dimension: Dimension, name: str) -> tuple[str, str]:
    """Return the texts of a segment without a row."""
    if dimension == "member":
        return (_("Former member"), "") if name else (_("No member"), _("Keys not created by a member"))
    if dimension == "project":
        return _("Project %(pk)s, deleted") % {"pk": name}, ""
    if dimension == "key":
        return _("Key %(pk)s, deleted") % {"pk": name}, ""
    return (_("Without an end user") if dimension == "end_user" else _("No model")), ""


def _filter_url(ctx: PageContext, dimension: Dimension, name: str) -> str:
    """Return the URL that filters by a segment, and shows what it consists of."""
    if not name:
        return ""
    parameter, after = _FILTERS[dimension]
    changes = {parameter: name, "group": "" if after == _DEFAULTS["group"] else after}
    return changed_url(ctx, ctx.url("usage-explorer"), **changes)


def _requests_url(ctx: PageContext, dimension: Dimension, name: str) -> str:
    """Return the URL of the requests of a segment, with the filters of the page."""
    if not name:
        return ""
    now = query_of(ctx)
    period = {"range": now.date_range.name}
    if now.date_range.name == "times":
        period |= {"from": ctx.query["from"], "to": ctx.query["to"]}
    elif now.date_range.name == "custom" or now.date_range.is_weeks:
        period = {"range": "custom", "from": now.date_range.first, "to": now.date_range.last}
    kept = {name: ctx.query.get(name, "") for name in _REQUEST_FILTERS}
    return with_query(ctx.url("requests"), **period, **(kept | {_FILTERS[dimension][0]: name}))


def _with_details(ctx: PageContext, now: ExplorerQuery, chart: Chart) -> Chart:
    """Return the chart with marks, and the requests of each day or week."""
    kept = {name: ctx.query.get(name, "") for name in _REQUEST_FILTERS}
    return replace(
        chart,
        step=timedelta(days=7 if now.step == "week" else 1),
        marks=marks_of(ctx),
        requests_url=with_query(ctx.url("requests"), **kept),
        selects=True,
    )


def _chart(
    now: ExplorerQuery, found: Segments, before: Segments | None, rows: list[SegmentRow], total: SegmentRow
) -> Chart:
    """Return the chart: stacked amounts, or a line of each quotient, and a dashed line of the previous period."""
    unit, steps = _UNITS[now.asked.measure], steps_between(now.date_range.start, now.date_range.end, now.step)
    is_stacked = now.asked.measure != "success"
    series = []
    for name, row in zip((*found.names, None), rows, strict=False):
        cells = by_step(found.days.get(name, {}), now.step)
        values = tuple(cells[at].figure if at in cells else 0 if is_stacked else None for at in steps)
        series.append(Series(row.name, row.kind, values, "area" if is_stacked else "line", in_legend=False))
    if not is_stacked:
        series = series[:LARGEST]
    sums = by_step(found.total_days, now.step)
    text = format_value(total.amount, unit)
    if before is not None:
        shift = now.date_range.start.astimezone(UTC).date() - now.date_range.previous[0].astimezone(UTC).date()
        moved = by_step({day + shift: amount for day, amount in before.total_days.items()}, now.step)
        values = tuple(moved[at].figure if at in moved else 0 if is_stacked else None for at in steps)
        label = _("Previous period")
        series.append(Series(label, "goal", values, "dash", format_value(total.previous, unit)))
    of = _("%(measure)s by %(dimension)s, %(label)s: %(total)s in total, at most %(most)s") % {
        "measure": MEASURES[now.asked.measure],
        "dimension": in_sentence(str(DIMENSIONS[now.asked.dimension])),
        "label": now.date_range.label,
        "total": text,
        "most": format_value(max((amount.figure or 0 for amount in sums.values()), default=0), unit),
    }
    at = tuple(datetime.combine(day, time.min, UTC) for day in steps)
    return Chart("explorer", of, at, tuple(series), unit, stacked=is_stacked)
