"""Child process of `millrace up` that pulls the models on the hub and prepares all models for loading.

Each line of its output is a JSON object: the progress of a model, or the source that replaces one on the hub.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from inference_worker.checkpoints.downloads.hub_source import HubSource
from inference_worker.checkpoints.model_source import ModelError, ensure_model
from inference_worker.checkpoints.model_store import ModelStore, check_files
from inference_worker.contract import env
from inference_worker.contract.settings import HUB_PREFIX, ModelSpec, SharedSettings
from millrace.environment.configuration import data_dir


def main() -> None:
    # Reads only this setting and the smallest free space, since the services' URLs are not known yet.
    specs: tuple[ModelSpec, ...] = env.read_one(os.environ, SharedSettings, "models")
    for spec in specs:
        try:
            if spec.source.startswith(HUB_PREFIX):
                source = str(_pull_once(spec))
                print(json.dumps({"model": spec.name, "source": source}), flush=True)
                spec = replace(spec, source=source)
            ensure_model(spec, data_dir(), partial(_report, spec.name, "converting"))
        except (ModelError, OSError) as exc:
            sys.exit(f"{spec.name}: {exc}")


def _pull_once(spec: ModelSpec) -> Path:
    """Return the pulled model's directory or .gguf file. A model that was pulled before is not pulled again."""
    source = HubSource.parse(spec.source.removeprefix(HUB_PREFIX))
    store = ModelStore(data_dir())
    if found := store.find(source.repository, source.revision, source.file):
        check_files(found)
        return found.source
    from inference_worker.checkpoints.downloads.hub import Hub  # takes half a second to import

    min_free_bytes: int = env.read_one(os.environ, SharedSettings, "min_free_disk")

    def progress(_file: str, done: int, total: int) -> None:
        _report(spec.name, "pulling", done, total)

    return Hub().pull(source, store, progress, min_free_bytes).source


def _report(model: str, step: str, done: int, total: int) -> None:
    print(json.dumps({"model": model, "step": step, "done": done, "total": total}), flush=True)


if __name__ == "__main__":
    main()
