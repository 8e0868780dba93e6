"""Rules for test modules, and the helper that waits for conditions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.waiting import eventually, eventually_async

TESTS = Path(__file__).resolve().parents[2]
SUPPORT = TESTS / "support"
MODULES = [path for path in TESTS.rglob("*.py") if not path.is_relative_to(SUPPORT)]


IMPORTED = re.compile(r"^\s*(?:from|import) (tests(?!\.support\b)[.\w]*)", re.MULTILINE)


def test_no_test_module_is_imported() -> None:
    found = [
        f"{path.relative_to(TESTS)} imports {name}"
        for path in TESTS.rglob("*.py")
        for name in IMPORTED.findall(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "move what test modules share to tests/support or a conftest.py"


def test_the_tenant_acme_is_created_by_one_fixture() -> None:
    found = [
        str(path.relative_to(TESTS))
        for path in MODULES
        for arguments in re.findall(r"^def acme\((.*?)\)", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        if not arguments.startswith("acme")
    ]
    assert found == [], "a fixture `acme` of a module extends the shared one, which the marker `acme` has arguments for"


def test_a_wait_returns_the_first_true_value() -> None:
    values = iter([0, "", 7, 8])
    assert eventually(lambda: next(values)) == 7


def test_a_wait_fails_with_a_description() -> None:
    with pytest.raises(AssertionError, match=r"did not become true in 0.01 seconds\nlog"):
        eventually(lambda: False, 0.01, describe=lambda: "log")


def test_a_wait_ignores_only_the_given_exceptions() -> None:
    values = iter([0, 1])
    assert eventually(lambda: 1 / next(values), ignored=(ZeroDivisionError,)) == 1
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 / 0, 0.01, ignored=(ZeroDivisionError,))


async def test_a_wait_in_an_event_loop() -> None:
    values = iter([0, 7, 0, 8])

    async def next_value() -> int:
        return next(values)

    assert await eventually_async(lambda: next(values)) == 7
    assert await eventually_async(next_value) == 8
    with pytest.raises(AssertionError, match=r"did not become true in 0.01 seconds"):
        await eventually_async(lambda: False, 0.01)
