"""The embedded model, converted once per session."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.tokenizer import Tokenizer
from inference_worker.models.model_source import ensure_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = ModelSpec("smollm2-135m", "embedded", "auto")
    return ensure_model(spec, tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


@pytest.fixture(autouse=True)
def fixed_random_numbers() -> Iterable[None]:
    torch.manual_seed(0)
    yield
