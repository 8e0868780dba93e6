"""Every registered screen with the keyboard only."""

from __future__ import annotations

from tests.support.frontend.pages import reachable_by_keyboard
from tests.support.frontend.screen_cases import POPULATED


@POPULATED
def test_every_control_is_reachable_by_keyboard(visit, screen):
    """Tab reaches every control with a visible focus ring, and Enter opens the menu."""
    page = visit(screen, "populated").page
    if screen.has_layout:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    reachable_by_keyboard(page)
