"""Django's command line, with the settings checked first."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from inference_worker.contract.command_line import format_quoted_commands
from inference_worker.contract.env import SettingsError
from millrace.environment.configuration import platform_settings, reject_unknown


def run(arguments: Sequence[str]) -> None:
    """Run a management command. The first argument is the program's name."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "millrace.conf.settings")
    try:
        reject_unknown()
        platform_settings()
    except SettingsError as exc:
        sys.exit(f"{arguments[0]}: {format_quoted_commands(str(exc))}")

    from django.core.management import ManagementUtility

    utility = ManagementUtility(list(arguments))
    utility.prog_name = arguments[0]  # Django removes its directory
    utility.execute()
