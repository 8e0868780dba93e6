"""Every registered screen with the keyboard only."""

from __future__ import annotations

from tests.support.frontend.screen_cases import POPULATED


@POPULATED
def test_every_control_is_reachable_by_keyboard(visit, screen):
    """Tab reaches every control with a visible focus ring, and Enter opens the menu."""
    page = visit(screen, "populated").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    usable = page.evaluate(
        """[...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
        .filter((one) => one.checkVisibility() && !one.disabled && one.tabIndex >= 0 && one.type !== "hidden"
          && (one.type !== "radio" || one.checked)).length"""
    )
    parts = 3 * page.locator("input[type=date]").count()  # day, month, year and the picker are four tab stops
    seen = set()
    for _ in range(usable + parts + 3):
        page.keyboard.press("Tab")
        at = page.evaluate(
            """(() => { const one = document.activeElement; if (one === document.body) return null;
            window.numbered ??= new Map(); if (!numbered.has(one)) numbered.set(one, numbered.size);
            return [numbered.get(one), getComputedStyle(one).outlineStyle, one.outerHTML.slice(0, 120)]; })()"""
        )
        if at is not None:
            assert at[1] != "none", at[2]
            seen.add(at[0])
    assert len(seen) >= usable - 1, (len(seen), usable)
