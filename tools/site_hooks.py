"""Hooks of the documentation site: decision records, generated parts, screenshots, and captions of code blocks.

mkdocs.yml names this file. The marks of code blocks are those of tests/support/code_blocks.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from tools import screenshots
from tools.generate_reference import with_parts

_MARK = re.compile(r'^( *```\w+) (?:runnable|(output)|needs="([^"]+)")$', re.MULTILINE)


def on_config(config: Any) -> Any:
    """Add the decision records to the navigation, in the order of their numbers."""
    docs = Path(config["docs_dir"])
    records = sorted((docs / "explanation" / "adr").glob("[0-9]*.md"))
    decisions = next(pages for name, pages in _sections(config["nav"]) if name == "Decisions")
    decisions.extend(str(record.relative_to(docs)) for record in records)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the screenshots that `make screenshots` has built."""
    for name, path in screenshots.available((screenshots.BUILT,)).items():
        address = f"screenshots/{name}.webp"
        if files.get_file_from_path(address) is None:
            files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of generated parts, screenshots and code blocks, which the site's Markdown does not know."""
    page = screenshots.with_screenshots(with_parts(markdown), screenshots.available())
    return _MARK.sub(_replace, page)


def _sections(entries: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name and the entries of each section of the navigation, at any depth."""
    for entry in entries:
        for name, part in entry.items() if isinstance(entry, dict) else ():
            if isinstance(part, list):
                yield name, part
                yield from _sections(part)


def _replace(match: re.Match[str]) -> str:
    fence, is_output, needs = match.groups()
    title = "Output" if is_output else f"Needs {needs}" if needs else ""
    return f'{fence} title="{title}"' if title else fence
