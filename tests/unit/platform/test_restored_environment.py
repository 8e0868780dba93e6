"""Changes of the environment end with the test that made them. The tests of a file run in order, in one process."""

from __future__ import annotations

import os

ADDED = "MILLRACE_ADDED_BY_A_TEST"


def test_a_test_changes_the_environment() -> None:
    os.environ["PATH"] += os.pathsep + ADDED
    os.environ[ADDED] = "x"


def test_the_next_test_has_the_former_environment() -> None:
    assert ADDED not in os.environ
    assert ADDED not in os.environ["PATH"]
