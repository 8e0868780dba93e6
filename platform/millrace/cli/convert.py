"""Child process of `millrace up`: makes every model ready to load, and says how far it is.

Each line of its output is `<model> <bytes done> <bytes in all>`.
"""

from __future__ import annotations

import sys

from inference_worker.env import SettingsError, load
from inference_worker.model_source import ModelError, ensure_model
from inference_worker.settings import SharedSettings


def main() -> None:
    try:
        settings = load(SharedSettings)
        for spec in settings.models:

            def progress(done: int, total: int, name: str = spec.name) -> None:
                print(name, done, total, flush=True)

            ensure_model(spec, settings.state_dir, progress)
    except (ModelError, SettingsError) as fault:
        sys.exit(str(fault))


if __name__ == "__main__":
    main()
