"""Paths of the platform's URL patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver

ADMIN_URLS = "tests.support.frontend.admin_urls"


def paths(urlconf: str | None = None) -> list[str]:
    """Return every path of the platform with a value for each argument."""

    def walk(patterns: list[Any], before: str) -> Iterator[str]:
        for pattern in patterns:
            route = before + str(pattern.pattern)
            if isinstance(pattern, URLResolver):
                yield from walk(pattern.url_patterns, route)
            elif isinstance(pattern, URLPattern):
                yield route

    return sorted({example_path(route) for route in walk(get_resolver(urlconf).url_patterns, "")})


def example_path(route: str) -> str:
    """Return the path of a URL pattern with a value for each argument."""
    plain = re.sub(r"<int:\w+>", "1", route)
    plain = re.sub(r"\(\?P<\w+>[^)]*\)|<(?:\w+:)?\w+>", "sso", plain)
    return "/" + re.sub(r"[\^$]|\\Z|\\", "", plain)
