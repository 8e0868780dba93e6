"""Every registered screen in every state: accessible, small, without console errors, and within the window."""

from __future__ import annotations

from tests.support.frontend.pages import checked
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
    assert state == "error" or page.locator(".panel-error").count() == 0, "a panel failed"
    checked(page)
    assert seen.complaints == []
    assert "secret detail" not in page.content()
