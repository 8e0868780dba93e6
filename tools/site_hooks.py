"""Hooks of the documentation site: the marks of code blocks become captions.

mkdocs.yml names this file. The marks are those of tests/support/code_blocks.py.
"""

from __future__ import annotations

import re
from typing import Any

_MARK = re.compile(r'^( *```\w+) (?:runnable|(output)|needs="([^"]+)")$', re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of code blocks, which the site's Markdown does not know."""
    return _MARK.sub(_replace, markdown)


def _replace(match: re.Match[str]) -> str:
    fence, is_output, needs = match.groups()
    title = "Output" if is_output else f"Needs {needs}" if needs else ""
    return f'{fence} title="{title}"' if title else fence
