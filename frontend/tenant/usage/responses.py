"""Responses of the exports of usage."""

from __future__ import annotations

from django.http import HttpResponse
from django.utils.translation import gettext as _

from frontend.core.date_ranges import DateRange


def csv_response(name: str, text: str, dates: DateRange) -> HttpResponse:
    """Return a CSV file. `name` is the file's name without the dates and the suffix."""
    return csv_file(f"{name}-{dates.first}-{dates.last}.csv", text)


def csv_file(filename: str, text: str) -> HttpResponse:
    """Return a CSV file with this name."""
    response = HttpResponse(text, content_type="text/csv; charset=utf-8")
    response.headers["Content-Disposition"] = f'attachment; filename="{filename}"'
    return response


def too_many_rows() -> HttpResponse:
    message = _("The export would have too many rows. Choose a shorter period.")
    return HttpResponse(message, status=422, content_type="text/plain")
