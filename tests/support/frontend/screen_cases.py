"""The registered screens as parameters of the table-driven tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.frontend.console import load_screens

# The short form of the browser tests opens each screen once, this one in all its states, and by keyboard the screens of
# the navigation and one form. All screens in all states: `make test-browser`.
IN_ALL_STATES, FORM = "keys", "keys-new"
SHOWN = [(screen, state) for screen in load_screens() for state in screen.states]
FULL = [screen for screen in load_screens() if "populated" in screen.states]


def _case(*values: Any, short: bool, name: str) -> Any:
    return pytest.param(*values, marks=[] if short else [pytest.mark.extended], id=name)


EACH = pytest.mark.parametrize(
    ("screen", "state"),
    [
        _case(
            *(screen, state),
            short=state == screen.states[0] or screen.name == IN_ALL_STATES,
            name=f"{screen.name}-{state}",
        )
        for screen, state in SHOWN
    ],
)
POPULATED = pytest.mark.parametrize(
    "screen",
    [
        _case(one, short="-" not in one.name.removeprefix("operator-") or one.name == FORM, name=one.name)
        for one in FULL
    ],
)
