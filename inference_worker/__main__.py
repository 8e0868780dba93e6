"""Start a worker: `python -m inference_worker`. docs/reference/configuration.md lists its settings."""

from __future__ import annotations

import sys

from inference_worker.contract.env import SettingsError
from inference_worker.contract.process_memory import reuse_freed_memory


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit(f"{__doc__}\nTakes no arguments." if sys.argv[1] not in ("-h", "--help") else __doc__)
    reuse_freed_memory()
    try:
        from inference_worker.worker.app import app
    except SettingsError as exc:
        sys.exit(str(exc))
    # A task only claims executions. One at a time is enough, since the next one claims all that were sent meanwhile.
    arguments = ["worker", "--pool=solo", "--loglevel=INFO"]
    app.worker_main([*arguments, "--without-gossip", "--without-mingle", "--without-heartbeat"])


if __name__ == "__main__":
    main()
