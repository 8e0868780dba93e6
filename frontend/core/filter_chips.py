"""Filter chips of lists: each choice is a link, so a filter applies immediately, is in the URL and needs no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from frontend.core.lists import CURSORS, Choice, changed_url, text_param, with_query
from frontend.core.page_context import PageContext

MAX_CHIP_CHOICES = 100


@dataclass(frozen=True)
class FilterChip:
    """One filter. `chosen` is the label of its value; empty: the filter is off. Without `choices` its value is text."""

    name: str  # name of the parameter
    label: str
    chosen: str
    clear_url: str
    choices: Sequence[Choice] = ()
    is_cut: bool = False
    is_text: bool = False
    value: str = ""
    hint: str = ""  # an example of a text


@dataclass(frozen=True)
class FilterBar:
    """The chips of a list. `hidden` are the other parameters, for the forms of texts."""

    url: str
    chips: Sequence[FilterChip]
    hidden: Sequence[tuple[str, str]]
    clear_url: str  # empty if no filter is on
    search: FilterChip | None = None  # a search field before the chips

    @property
    def is_filtered(self) -> bool:
        return bool(self.clear_url)


def choice_chip(
    ctx: PageContext, url: str, name: str, label: str, rows: Iterable[tuple[Any, str]], chosen: Any
) -> FilterChip:
    """Return a chip with a link for each value and label. `chosen` is the value of the page, or None."""
    found = [(value, text) for value, text in rows][: MAX_CHIP_CHOICES + 1]
    labels = {value: text for value, text in found if chosen is not None and value == chosen}
    shown = [Choice(text, changed_url(ctx, url, **{name: value}), value == chosen) for value, text in found]
    return FilterChip(
        name,
        label,
        "" if chosen in (None, "") else str(labels.get(chosen, chosen)),
        changed_url(ctx, url, **{name: ""}),
        shown[:MAX_CHIP_CHOICES],
        len(found) > MAX_CHIP_CHOICES,
    )


def text_chip(ctx: PageContext, url: str, name: str, label: str, hint: str = "", most: int = 100) -> FilterChip:
    """Return a chip whose value is typed."""
    value = text_param(ctx, name, most)
    return FilterChip(name, label, value, changed_url(ctx, url, **{name: ""}), is_text=True, value=value, hint=hint)


def filter_bar(ctx: PageContext, url: str, chips: Sequence[FilterChip], search: FilterChip | None = None) -> FilterBar:
    """Return the bar with these chips. Parameters that belong to no chip stay when the filters are cleared."""
    names = {chip.name for chip in (*chips, search) if chip is not None}
    params = {name: value for name, value in ctx.query.items() if name not in CURSORS}
    kept = {name: value for name, value in params.items() if name not in names}
    is_on = any(chip.chosen for chip in (*chips, search) if chip is not None)
    return FilterBar(url, chips, tuple(params.items()), with_query(url, **kept) or url if is_on else "", search)
