"""Triton's interpreter for the numeric tests of the kernels, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    child = Interpreter()
    yield child
    child.close()
