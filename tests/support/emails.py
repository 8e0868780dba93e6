"""Checks of every email: text and HTML with the same content, and no external resources."""

from __future__ import annotations

import re
from typing import Any


def html(message: Any) -> str:
    ((content, kind),) = message.alternatives
    assert kind == "text/html"
    return str(content)


def check_email(message: Any, *words: str) -> None:
    """Check that both parts contain the words, and that the HTML loads nothing and has a dark color scheme."""
    content_html = html(message)
    for word in words:
        assert word in message.body
        assert word in content_html
    assert not re.search(r"<img|<script|<link|url\(|@import| src=", content_html)
    assert "prefers-color-scheme: dark" in content_html
