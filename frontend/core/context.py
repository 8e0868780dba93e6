"""Context processors of all templates."""

from __future__ import annotations

from django.http import HttpRequest


def theme(request: HttpRequest) -> dict[str, str]:
    """Return the selected theme: light, dark, or empty for the system's theme.

    The server renders it, so that pages do not flash.
    """
    theme = request.COOKIES.get("theme", "")
    return {"theme": theme if theme in ("light", "dark") else ""}
