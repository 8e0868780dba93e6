"""The embedded model, converted once a session."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from inference_worker.engine.tokenizer import Tokenizer
from inference_worker.model_source import ensure_model
from inference_worker.settings import ModelSpec


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: minutes long; runs only when asked for by -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in str(config.getoption("markexpr")):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


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
