"""Django's command line, with the settings checked first."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from inference_worker.contract.env import SettingsError
from millrace.conf.environment import platform_settings, reject_unknown


def run(arguments: Sequence[str]) -> None:
    """Run a management command. The first argument is the program's name."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "millrace.conf.settings")
    try:
        reject_unknown()
        platform_settings()
    except SettingsError as exc:
        sys.exit(f"{arguments[0]}: {exc}")

    from django.core.management import execute_from_command_line

    execute_from_command_line(list(arguments))
