#!/usr/bin/env python
"""Django's command line, with the platform's source root on the path and its settings checked first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def main() -> None:
    # Appended, not prepended: nothing here may come before the standard library.
    sys.path += [path for path in (str(ROOT), str(ROOT / "platform")) if path not in sys.path]
    from inference_worker.contract.env import SettingsError
    from millrace.conf.environment import platform_settings, reject_unknown

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "millrace.conf.settings")
    try:
        reject_unknown()
        platform_settings()
    except SettingsError as exc:
        sys.exit(f"manage.py: {exc}")

    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
