"""Redirects to URLs from requests: `?next=`, `Referer` and htmx's header of the current page."""

from __future__ import annotations

import re
import unicodedata
from urllib.parse import unquote

from django.http import HttpRequest

MAX_URL_LENGTH = 2048
MAX_ENCODINGS = 4  # levels of encoding of a path; each %25 is one more
# Browsers read a backslash as a slash, and remove dot segments.
_OTHER_SITE = re.compile(r"\\|//|/\.{1,2}(/|$)")


def is_site_url(url: str) -> bool:
    """Return whether every browser reads the URL as an absolute path of this site, with or without a query."""
    if not url.startswith("/") or len(url) > MAX_URL_LENGTH or _has_hidden_characters(url):
        return False
    path = re.split("[?#]", url, maxsplit=1)[0]
    for _ in range(MAX_ENCODINGS):
        if _OTHER_SITE.search(path) or _has_hidden_characters(path):
            return False
        if path == (decoded := unquote(path)):
            return True
        path = decoded
    return False


def _has_hidden_characters(text: str) -> bool:
    """Return whether the text has spaces, control characters or other characters that browsers may remove."""
    return any(unicodedata.category(character)[0] in "CZ" for character in text)


def site_url_in_header(request: HttpRequest, header: str, *, any_host: bool = False) -> str | None:
    """Return path and query of the complete URL in the header, or None if it is not one of this site.

    `any_host`: the header is sent only by pages of this site, whose host a proxy may have replaced.
    """
    url = request.headers.get(header, "")
    host = "[^/?#]+" if any_host else re.escape(request.get_host())
    origin = re.match(rf"https?://{host}(?=/)", url)
    path = url[origin.end() :].partition("#")[0] if origin else ""
    return path if is_site_url(path) else None
