"""The option --model of `millrace up`: from models to the setting MILLRACE_MODELS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from inference_worker.checkpoints.downloads.hub_source import HubSource
from inference_worker.contract.settings import EMBEDDED, EMBEDDED_ENCODER, HUB_PREFIX, format_models, parse_models

MAX_NAME_LETTERS = 64
_EMBEDDED_NAMES = {"embedded": "smollm2-135m", EMBEDDED_ENCODER: "all-minilm-l6-v2"}  # as in MILLRACE_MODELS' default


def as_setting(sources: Sequence[str]) -> str:
    """Return MILLRACE_MODELS with a deployment for each source, which may have options as in MILLRACE_MODELS.

    A source is a directory, a .gguf file, an embedded model, or an id on the hub.

    Raises:
        ModelError: a source is none of them.
        ValueError: an option is invalid, two models have the same name, or a path has a separator of the setting.
    """
    return format_models(parse_models(",".join(map(_setting, sources))))


def _setting(text: str) -> str:
    source, question_mark, options = text.partition("?")
    path = Path(source).expanduser().resolve()
    if source in EMBEDDED:
        name = _EMBEDDED_NAMES[source]
    elif path.exists():
        name, source = path.stem if path.is_file() else path.name, str(path)
    else:
        found = HubSource.parse(source.removeprefix(HUB_PREFIX))
        name, source = found.repository.rpartition("/")[2], f"{HUB_PREFIX}{found}"
    name = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:MAX_NAME_LETTERS] or "model"
    return f"{name}={source}{question_mark}{options}"
