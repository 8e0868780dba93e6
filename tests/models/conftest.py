"""Fixtures of the tests with published model files, which fail without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.real_models import MissingModelsError, find_models


@pytest.fixture(scope="session")
def files() -> dict[str, Path]:
    """Return the files by the names of their models."""
    try:
        return find_models()
    except MissingModelsError as exc:
        message = str(exc)
    pytest.fail(message, pytrace=False)


@pytest.fixture(scope="session")
def converted_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data directory for the converted files, so that each is converted once."""
    directory = tmp_path_factory.mktemp("converted")
    (directory / "models").mkdir()
    return directory
