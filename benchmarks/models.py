"""The bundled model of the benchmarks, converted once in a checkout."""

from __future__ import annotations

from pathlib import Path

from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec
from tests.support.models import models_data_dir


def bundled_model() -> Path:
    """Return the directory of the bundled chat model in the format that the engine loads."""
    return ensure_model(ModelSpec("smollm2-135m", "embedded", "auto"), models_data_dir())
