"""Pictures of screens, compared with those of tests/browser/pictures, in light and dark.

A picture is compared at half its size, because versions of Chromium draw letters slightly differently. Times, code and
what depends on the day are covered. `UPDATE_PICTURES=1` writes the pictures again; look at them before committing.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from PIL import Image, ImageChops
from playwright.sync_api import Page

from tests.support.frontend.console import SLUGS, load_screens
from tests.support.frontend.pages import settle

load_screens()  # so that the tenants are the same if all tests run
DIRECTORY = Path(__file__).parent / "pictures"
SIZE = {"width": 1440, "height": 900}
COVERED = "time, pre, canvas, .page-header .text-muted, .mono, .search-button"
SCREENS = {
    "overview": "/t/{slug}/",
    "requests": "/t/{slug}/requests/",
    "keys": "/t/{slug}/keys/",
    "keys-new": "/t/{slug}/keys/new",
    "projects": "/t/{slug}/projects/",
    "budgets": "/t/{slug}/budgets/",
    "alerts": "/t/{slug}/alerts/",
    "webhooks": "/t/{slug}/webhooks/",
    "playground": "/t/{slug}/playground/",
    "settings": "/t/{slug}/settings/",
    "account": "/account/",
}
MAX_DIFFERENCE = 40  # of a pixel's brightness, out of 255, at the edges of letters
MAX_CHANGED = 0.002  # part of the pixels


def picture(page: Page) -> Image.Image:
    settle(page)
    taken = page.screenshot(mask=[page.locator(COVERED)], mask_color="#808080", animations="disabled", caret="hide")
    return Image.open(io.BytesIO(taken)).convert("L").resize((SIZE["width"] // 2, SIZE["height"] // 2))


def changed(before: Image.Image, after: Image.Image) -> float:
    """Return the part of the pixels that differ."""
    if before.size != after.size:
        return 1.0
    counts = ImageChops.difference(before, after).histogram()
    return sum(counts[MAX_DIFFERENCE:]) / sum(counts)


def check(taken: Image.Image, name: str) -> None:
    path = DIRECTORY / f"{name}.png"
    if os.environ.get("UPDATE_PICTURES"):
        taken.quantize(64).save(path, optimize=True)
        return
    assert path.exists(), f"no picture {path.name}: run with UPDATE_PICTURES=1"
    part = changed(Image.open(path).convert("L"), taken)
    assert part <= MAX_CHANGED, f"{part:.2%} of {path.name} differ"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_looks_as_before(contexts, live, world, name, theme):
    page = contexts("owner").new_page()
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.goto(SCREENS[name].format(slug=SLUGS["empty"]), wait_until="load")
    check(picture(page), f"{name}-{theme}")
    page.close()
    live.wait_until_idle()


def test_the_sign_in_looks_as_before(window, served):
    page = window(base_url=served, viewport=SIZE, color_scheme="light", reduced_motion="reduce").new_page()
    page.goto("/login", wait_until="load")
    check(picture(page), "login-light")


def test_a_changed_picture_is_found():
    before = Image.new("L", (100, 100), 255)
    after = before.copy()
    assert changed(before, after) == 0
    after.paste(0, (0, 0, 10, 10))
    assert changed(before, after) == 0.01 > MAX_CHANGED
    assert changed(before, after.resize((10, 10))) == 1
