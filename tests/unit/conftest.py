"""No unit test starts a process. The root `conftest.py` checks their fixtures."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_process() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a unit test started a process: move it to tests/integration")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        yield
