"""The option --model of `millrace up`: from models to the setting MILLRACE_MODELS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from inference_worker.contract.settings import EMBEDDED, EMBEDDED_ENCODER, HUB_PREFIX, ModelSpec, format_models
from millrace.devserver.hub_source import HubSource

MAX_NAME_LETTERS = 64
_EMBEDDED_NAMES = {"embedded": "smollm2-135m", EMBEDDED_ENCODER: "all-minilm-l6-v2"}  # as in MILLRACE_MODELS' default


def as_setting(sources: Sequence[str]) -> str:
    """Return MILLRACE_MODELS with a deployment for each directory, .gguf file, embedded model, or id on the hub.

    Raises:
        ModelError: a source is none of them.
        ValueError: two models have the same name, or a path has a separator of the setting.
    """
    specs = [_spec(source) for source in sources]
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"two models have the same name ({', '.join(names)}); name them with MILLRACE_MODELS")
    return format_models(specs)


def _spec(source: str) -> ModelSpec:
    path = Path(source).expanduser()
    if source in EMBEDDED:
        return ModelSpec(_EMBEDDED_NAMES[source], source, "auto")
    if path.exists():
        return ModelSpec(
            _name(path.resolve().stem if path.is_file() else path.resolve().name), str(path.resolve()), "auto"
        )
    found = HubSource.parse(source.removeprefix(HUB_PREFIX))
    return ModelSpec(_name(found.repository.rpartition("/")[2]), f"{HUB_PREFIX}{found}", "auto")


def _name(text: str) -> str:
    """Return a deployment's name: letters, digits and . _ -, the first one a letter or digit."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:MAX_NAME_LETTERS] or "model"
