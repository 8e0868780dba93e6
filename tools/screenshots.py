"""The screenshots of the documentation. Six are in git; `make screenshots` builds all for the site.

A page names another screenshot by a mark, which `tools/site_hooks.py` replaces:

    <!-- screenshot login-light-1440: Sign-in, as built -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "docs" / "screenshots"
BUILT = ROOT / "build" / "screenshots"
STORED_NAMES = (  # pictures in README.md, docs/tutorials/console-tour.md and docs/reference/sketches.md
    "budgets-dark-1440",
    "invoices-detail-light-1440",
    "operator-fleet-light-1440",
    "overview-light-1440",
    "requests-detail-dark-1440",
    "requests-detail-light-1440",
)
_MARK = re.compile(r"<!-- screenshot ([\w-]+): (.+?) -->")


def available(directories: Iterable[Path] = (BUILT, STORED)) -> dict[str, Path]:
    """Return the file of each screenshot by name. Of a name in several directories, the first one counts."""
    found: dict[str, Path] = {}
    for directory in directories:
        for path in sorted(directory.glob("*.webp")):
            found.setdefault(path.stem, path)
    return found


def with_screenshots(page: str, names: Iterable[str]) -> str:
    """Return a page with the screenshots in place of their marks, and a placeholder for those not in `names`."""
    known = set(names)

    def replace(match: re.Match[str]) -> str:
        name, text = match.groups()
        if name in known:
            return f"![{text}](../screenshots/{name}.webp)"
        return f"*{text}: not built, see `make screenshots`*"

    return _MARK.sub(replace, page)
