"""Every registered screen in every state: accessible, small, without console errors, and within the window."""

from __future__ import annotations

from tests.support.frontend.pages import accessible
from tests.support.frontend.screen_cases import EACH

KB = 1024


@EACH
def test_a_screen_is_accessible_small_and_without_errors(visit, screen, state):
    seen = visit(screen, state)
    page = seen.page
    assert page.evaluate("window.shift") <= 0.05
    code = sum(seen.weights.get(kind, 0) for kind in ("html", "css", "js"))
    assert 0 < code <= 60 * KB, seen.weights
    assert code + seen.weights.get("font", 0) <= 150 * KB, seen.weights
    accessible(page)
    assert state == "error" or page.locator(".panel-error").count() == 0, "a panel failed"
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 320, "height": 844})  # 1280 pixels at a zoom of 400%, see WCAG 1.4.10
    accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert seen.complaints == []
    assert "secret detail" not in page.content()
