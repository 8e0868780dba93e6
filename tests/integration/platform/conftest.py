from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """An empty data directory that other users can traverse, as PostgreSQL of root requires (pytest's are private)."""
    folder = Path(tempfile.mkdtemp(prefix="millrace-state-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)
