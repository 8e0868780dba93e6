#!/usr/bin/env python
"""Django's command line, with the platform's source root on the path."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def main() -> None:
    # Appended, not prepended: nothing here may come before the standard library.
    sys.path += [path for path in (str(ROOT), str(ROOT / "platform")) if path not in sys.path]
    from millrace.conf.management import run

    run(["manage.py", *sys.argv[1:]])


if __name__ == "__main__":
    main()
