"""Child process of `millrace up` that prepares all models for loading and reports its progress.

Each line of its output is `<model> <bytes done> <bytes in total>`.
"""

from __future__ import annotations

import os
import sys

from inference_worker.contract import env
from inference_worker.contract.settings import ModelSpec, SharedSettings
from inference_worker.models.model_source import ModelError, ensure_model
from millrace.conf.environment import data_dir


def main() -> None:
    # Reads only this setting, since the services' URLs are not known yet.
    specs: tuple[ModelSpec, ...] = env.read_one(os.environ, SharedSettings, "models")
    for spec in specs:

        def progress(done: int, total: int, name: str = spec.name) -> None:
            print(name, done, total, flush=True)

        try:
            ensure_model(spec, data_dir(), progress)
        except ModelError as exc:
            sys.exit(str(exc))


if __name__ == "__main__":
    main()
