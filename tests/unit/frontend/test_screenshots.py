"""The screenshots of the documentation: every screen of the sidebar, in light and dark."""

from __future__ import annotations

import re
from pathlib import Path

from frontend.core.navigation import OPERATOR, TENANT

DOCS = Path(__file__).parents[3] / "docs"
PICTURES = DOCS / "screenshots"
MAX_BYTES = 8 * 2**20


def test_every_screen_of_the_sidebar_is_shown_in_light_and_dark():
    page = (DOCS / "reference" / "screens.md").read_text(encoding="utf-8")
    routes = [entry.route for group in (*TENANT, *OPERATOR) for entry in group.entries]
    wanted = {f"{route}-{theme}-1440.webp" for route in routes if ":" not in route for theme in ("light", "dark")}
    assert len(wanted) > 50
    shown = set(re.findall(r"\.\./screenshots/([\w-]+\.webp)", page))
    assert wanted - shown == set()
    assert {name for name in shown if not (PICTURES / name).exists()} == set()


def test_the_screenshots_are_small():
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) <= MAX_BYTES
