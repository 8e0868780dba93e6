"""Imports without the optional packages of a library, which take memory in each process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Make imports of these packages fail, unless they are imported already. For libraries that try to import them."""
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(missing))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
