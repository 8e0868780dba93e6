#!/usr/bin/env python3
"""Django's command line, with the platform's source root on the path."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def use_environment() -> None:
    """Continue with the Python of `.venv` if this one has no Django."""
    if importlib.util.find_spec("django"):
        return
    environment = ROOT / ".venv"
    python = environment / "bin" / "python"
    if not python.is_file() or Path(sys.prefix) == environment:
        sys.exit("manage.py: Django is not installed. Run `make setup` first.")
    os.execv(python, [str(python), *sys.argv])  # noqa: S606


def main() -> None:
    use_environment()
    # Appended, not prepended: nothing here may come before the standard library.
    sys.path += [path for path in (str(ROOT), str(ROOT / "platform")) if path not in sys.path]
    from millrace.conf.management import run

    run(["manage.py", *sys.argv[1:]])


if __name__ == "__main__":
    main()
