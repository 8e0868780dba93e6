"""Tables as CSV that a spreadsheet shows as they are."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from django.http import HttpResponse

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def as_csv(heading: Sequence[str], rows: Iterable[Sequence[str | int]], name: str) -> HttpResponse:
    """A download. Numbers are given as `int`, or as `Exact` text; any other text is kept from being a formula."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(heading)
    writer.writerows([_tame(value) for value in row] for row in rows)
    answer = HttpResponse(out.getvalue(), content_type="text/csv; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}.csv"'
    return answer


class Exact(str):
    """A decimal number as text, which may begin with a minus."""

    __slots__ = ()


def _tame(value: str | int) -> str | int:
    """A text that a spreadsheet would take for a formula stays a text."""
    if isinstance(value, Exact | int):
        return value
    return f"'{value}" if value.lstrip(" ").startswith(_FORMULA) else value
