"""What tests ask of every mail: text and HTML of the same words, and nothing to load."""

from __future__ import annotations

import re
from typing import Any


def html(message: Any) -> str:
    ((content, kind),) = message.alternatives
    assert kind == "text/html"
    return str(content)


def alike(message: Any, *words: str) -> None:
    """Both parts say the words; the HTML names nothing to load, and is made for dark readers too."""
    shown = html(message)
    for word in words:
        assert word in message.body
        assert word in shown
    assert not re.search(r"<img|<script|<link|url\(|@import| src=", shown)
    assert "prefers-color-scheme: dark" in shown
