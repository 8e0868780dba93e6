"""What every template knows."""

from __future__ import annotations

from django.http import HttpRequest


def look(request: HttpRequest) -> dict[str, str]:
    """Return the chosen theme: light, dark, or nothing for the system's.

    Said by the server, so that no page flashes.
    """
    theme = request.COOKIES.get("theme", "")
    return {"theme": theme if theme in ("light", "dark") else ""}
