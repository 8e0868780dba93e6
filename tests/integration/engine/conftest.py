"""The embedded model, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.settings import ModelSpec
from tests.support.models import models_data_dir


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return ensure_model(ModelSpec("smollm2-135m", "embedded", "auto"), models_data_dir())


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


@pytest.fixture(autouse=True)
def fixed_random_numbers() -> Iterable[None]:
    torch.manual_seed(0)
    yield
