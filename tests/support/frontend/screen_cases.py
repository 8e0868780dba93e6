"""The registered screens as parameters of the table-driven tests."""

from __future__ import annotations

import pytest

from tests.support.frontend.console import load_screens

SHOWN = [(screen, state) for screen in load_screens() for state in screen.states]
EACH = pytest.mark.parametrize(("screen", "state"), SHOWN, ids=[f"{one.name}-{state}" for one, state in SHOWN])
FULL = [screen for screen in load_screens() if "populated" in screen.states]
POPULATED = pytest.mark.parametrize("screen", FULL, ids=[one.name for one in FULL])
