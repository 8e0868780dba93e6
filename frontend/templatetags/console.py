"""Template tags of the console: numbers, times, icons, panels, charts and meters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

from django import template
from django.template.loader import render_to_string
from django.templatetags.static import static
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from billing.currencies.amounts import FEMTO_DIGITS
from frontend.core import gauges, labels, languages, layout, numbers
from frontend.core.audit_words import action_label
from frontend.core.backend_messages import translate_message
from frontend.core.charts import Chart, Unit, format_value
from frontend.core.labels import OUTCOME_KINDS, REQUEST_COUNTS, REQUEST_LABELS, outcome_label
from frontend.core.languages import day_text
from frontend.core.numbers import Money
from frontend.core.panels import RenderedPanel
from frontend.tenant.budgets.amounts import BudgetAmount
from millrace.apps.request_log.selectors import served_model
from tenants.models import User

register = template.Library()
register.filter(translate_message)
register.filter(served_model)


@register.simple_tag
def page_currency() -> str:
    """Return the currency of the page's amounts."""
    return numbers.page_currency()


@register.filter
def femto(amount: int | None) -> Money | None:
    return None if amount is None else Money(int(amount))


@register.filter
def nano(amount: int | None) -> Money | None:
    return None if amount is None else Money.nano(int(amount))


@register.filter
def cents(amount: int | None) -> Money | None:
    return None if amount is None else Money.cents(int(amount))


@register.filter
def money(amount: Money | None, how: str = "") -> str:
    """Return an amount with dimmed cents and its exact value as title. "less" shows a reduction."""
    if amount is None:
        return "–"
    if how == "less":
        amount = Money(-amount.femto, amount.currency)
    return _money(amount, amount.parts, is_exact=amount.femto % amount.femto_a_cent == 0)


@register.filter
def money_at(amount: Money | None, places: int) -> str:
    """Return an amount with this number of decimals, which is the same in all rows of a column."""
    if amount is None:
        return "–"
    return _money(amount, amount.parts_at(places), is_exact=amount.femto % 10 ** (FEMTO_DIGITS - places) == 0)


def _money(amount: Money, parts: tuple[str, str], *, is_exact: bool) -> str:
    return format_html(
        '<data class="tabular" value="{}"{}>{}<span class="cents">{}</span></data>',
        amount.exact,
        mark_safe("") if is_exact else format_html(' title="{}"', amount.exact_text),
        *parts,
    )


@register.filter
def count(value: int | None) -> str:
    """Return a count: exact up to 99,999, and three digits with the exact number as title above."""
    if value is None:
        return "–"
    short, whole = numbers.compact(value), numbers.exact(value)
    if short == whole:
        return format_html('<span class="tabular">{}</span>', whole)
    return format_html('<data class="tabular" value="{}" title="{}">{}</data>', value, whole, short)


@register.filter
def quantity(amount: BudgetAmount) -> str:
    """Return a measured amount: money, or a count with its unit."""
    return money(amount.money) if amount.money else format_html("{} {}", count(amount.number), amount.unit)


@register.filter
def in_full(amount: BudgetAmount) -> str:
    """Return an amount that a user has typed, such as a limit, in full."""
    return money(amount.money) if amount.money else format_html("{} {}", exact(amount.number), amount.unit)


@register.filter
def exact(value: int) -> str:
    """Return all digits in groups of three."""
    return numbers.exact(value)


@register.filter
def duration(microseconds: int | None) -> str:
    return "–" if microseconds is None else numbers.duration(microseconds)


@register.filter
def share(part: int | None, whole: int) -> str:
    """Return a part in percent."""
    return "–" if part is None else numbers.share(part, whole)


@register.filter
def initials(user: User) -> str:
    return layout.initials(user.name or user.email)


@register.filter
def in_sentence(label: str) -> str:
    return languages.in_sentence(label)


@register.filter
def choice_label(label: str) -> str:
    return labels.choice_label(label)


@register.filter
def chart_value(value: int | None, unit: Unit) -> str:
    return format_value(value, unit)


@register.filter
def action(value: str) -> str:
    """Return the action of an audit entry in words."""
    return action_label(value)


@register.filter
def milliseconds(value: int | None) -> str:
    return "–" if value is None else numbers.duration(value * 1000)


@register.filter
def outcome(value: str, status: str = "") -> str:
    """Return the badge of a request's outcome, with its HTTP status."""
    text = f"{outcome_label(value)} · {status}" if status else outcome_label(value)
    return format_html('<span class="badge {}">{}</span>', OUTCOME_KINDS[value], text)


@register.filter
def when(at: datetime | None, form: str = "minute") -> str:
    """Return a time in the user's time zone, as "day", "minute" or "second", with UTC as title.

    The year is shown only if it is not the current one.
    """
    if at is None:
        return "–"
    here = timezone.localtime(at)
    day = day_text(here, "j M" if here.year == timezone.localtime().year else "j M Y")
    text = {"day": day, "minute": f"{day}, {here:%H:%M}", "second": f"{day}, {here:%H:%M:%S}"}[form]
    utc = at.astimezone(UTC)
    return format_html(
        '<time datetime="{}" title="{} UTC">{}</time>', utc.isoformat(), f"{utc:%Y-%m-%d %H:%M:%S}", text
    )


@register.filter
def clock(at: datetime) -> str:
    """Return the time of day in the user's time zone: 14:02:10."""
    return format_html('<time datetime="{}">{}</time>', at.isoformat(), f"{timezone.localtime(at):%H:%M:%S}")


@register.filter
def day(of: date) -> str:
    """Return a calendar day without a time zone."""
    return format_html('<time datetime="{}">{}</time>', of.isoformat(), day_text(of))


@register.filter
def month(label: str) -> str:
    """Return a month such as 2026-10 in words."""
    return languages.month_text(label)


@register.simple_tag
def icon(name: str, kind: str = "") -> SafeString:
    """Return a symbol of icons.svg. It is hidden from assistive technology, so it needs a text or a label."""
    address = static("frontend/vendor/icons.svg")
    return format_html('<svg class="icon {}" aria-hidden="true"><use href="{}#{}"/></svg>', kind, address, name)


@register.simple_tag
def request_count(kind: str, label: str = "") -> SafeString:
    """Return the label of a number of received, accepted or completed requests, with the definition as title."""
    return format_html('<span title="{}">{}</span>', REQUEST_COUNTS[kind], label or REQUEST_LABELS[kind])


@register.simple_tag
def meter(part: int | None, whole: int, kind: str = "", size: str = "") -> SafeString:
    """Return a small bar.

    `kind` is the name of a color; without it, the bar warns near its limit. The number is shown beside it.
    """
    part = part or 0
    width = gauges.percent(part, whole)
    return format_html(
        '<svg class="meter {}" aria-hidden="true"><rect class="rail" width="100%" height="100%" rx="3"/>'
        '<rect class="{}" width="{}%" height="100%" rx="3"/></svg>',
        size,
        kind or gauges.level(part, whole) or "fill",
        width,
    )


@register.simple_tag
def sparkline(values: Sequence[int]) -> SafeString:
    """Return a small line of values, the oldest first. Empty if all are 0. The number is shown beside it."""
    points = gauges.line_points(values)
    if not points:
        return SafeString("")
    return format_html(
        '<svg class="sparkline" viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
        '<polyline points="{}"/></svg>',
        points,
    )


@register.simple_tag(takes_context=True)
def panel(context: Any, name: str, kind: str = "card") -> SafeString:
    """Return a panel by its name; empty if the user may not see it. `kind` contains its classes, like "card span-8"."""
    shown: RenderedPanel | None = context["panels"].get(name)
    if shown is None:
        return SafeString("")
    return render_to_string("frontend/parts/panel.html", {"shown": shown, "kind": kind})


@register.simple_tag
def chart(of: Chart) -> SafeString:
    """Return the drawing, its legend and its table."""
    return render_to_string("frontend/parts/chart.html", {"chart": of})


@register.simple_block_tag
def table(
    content: str, label: str, caption: str, *columns: str, more: Sequence[str] = (), kind: str = "scroll stacked"
) -> SafeString:
    """Return a table in a region that scrolls; the content is its rows.

    A column "#Cost" is numeric. The label of "!Actions" is hidden. Other columns are shown as they are. `more` are
    further columns, such as those that the user has chosen, whose cells are in `column` tags.
    """
    headings = [_heading(column) for column in (*columns, *more)]
    shown = {"label": label, "caption": caption, "columns": headings, "kind": kind}
    return render_to_string("frontend/parts/table.html", shown | {"content": content})


@register.simple_block_tag(takes_context=True)
def column(context: Any, content: SafeString, name: str) -> SafeString:
    """Return the cell of a column if the user shows it: its name is in `panel.columns`."""
    shown = template.Variable("panel.columns").resolve(context)
    return content if name in shown else SafeString("")


def _heading(column: str) -> SafeString:
    is_numeric, is_hidden = column.startswith("#"), column.startswith("!")
    text = column[is_numeric or is_hidden :]
    shown = format_html('<span class="visually-hidden">{}</span>', text) if is_hidden else text
    return format_html('<th scope="col"{}>{}</th>', mark_safe(' class="numeric"') if is_numeric else "", shown)


@register.simple_block_tag
def stats(content: str, kind: str = "") -> SafeString:
    """Return a strip of figures; the content is its `stat` tags. `kind` is empty or "stats-dense"."""
    return format_html('<dl class="stats {}">{}</dl>', kind, content)


@register.simple_block_tag
def stat(content: str, label: str, value: object, kind: str = "", delta: object = None) -> SafeString:
    """Return one figure of a strip; the content explains it. `kind` is empty, "warn", "bad" or "small"."""
    figure = {"label": label, "value": value, "kind": kind, "delta": delta, "detail": content}
    return render_to_string("frontend/parts/stat.html", figure)


@register.simple_tag
def code(text: str, label: str) -> SafeString:
    """Return a block of code with a copy button."""
    return render_to_string("frontend/parts/code.html", {"text": text, "label": label})


@register.simple_tag(takes_context=True)
def to(context: Any, name: str, *arguments: Any) -> str:
    """Return the URL of a page of the same tenant, or of an operator page."""
    found: str = context["ctx"].url(name, *arguments)
    return found


@register.simple_tag(takes_context=True)
def opens(context: Any, place: str, page: str, *arguments: Any) -> SafeString:
    """Return the attributes of a link that opens its page in the "dialog" or the "drawer".

    `page` is a URL, or the name of one with its arguments. It is a plain link without scripts.
    """
    url = page if "/" in page else context["ctx"].url(page, *arguments)
    return format_html('href="{}" hx-get="{}" hx-target="#{}" hx-swap="innerHTML"', url, url, place)
