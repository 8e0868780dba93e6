"""The screenshots of the documentation: six in git, and all that were built on the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.core.screens import OPERATOR, TENANT, sidebar_screens
from tests.support.frontend.gallery import gallery
from tools import screenshots

MAX_BYTES = 512 * 2**10


def test_six_screenshots_are_in_git_and_small() -> None:
    assert sorted(screenshots.available((screenshots.STORED,))) == sorted(screenshots.STORED_NAMES)
    assert len(screenshots.STORED_NAMES) == 6
    assert sum(path.stat().st_size for path in screenshots.STORED.iterdir()) <= MAX_BYTES


def test_the_list_shows_each_screen_in_light_and_dark_in_the_order_of_the_sidebar() -> None:
    screens = (*sidebar_screens(TENANT), *sidebar_screens(OPERATOR))
    routes = [screen.route for screen in screens if ":" not in screen.route]
    assert len(routes) > 25
    page = gallery(sorted(routes))
    places = [
        page.index(f"(../screenshots/{route}-{theme}-1440.webp)") for route in routes for theme in ("light", "dark")
    ]
    assert places == sorted(places)
    assert all(f"(../screenshots/{route}-light-390.webp)" in page for route in routes)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"keys-light-1440"}, "| ![Keys, as built](../screenshots/keys-light-1440.webp) |"),
        (set(), "| *Keys, as built: not built, see `make screenshots`* |"),
    ],
)
def test_a_screenshot_that_is_not_built_has_a_placeholder(names: set[str], expected: str) -> None:
    assert screenshots.with_screenshots("| <!-- screenshot keys-light-1440: Keys, as built --> |", names) == expected


def test_a_built_screenshot_comes_before_a_stored_one(tmp_path: Path) -> None:
    built, stored = tmp_path / "built", tmp_path / "stored"
    for directory in (built, stored):
        directory.mkdir()
        (directory / "a.webp").touch()
    (stored / "b.webp").touch()
    found = screenshots.available((built, stored, tmp_path / "missing"))
    assert found == {"a": built / "a.webp", "b": stored / "b.webp"}
