from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from millrace.cli.reference import all_settings

ROOT = Path(__file__).resolve().parents[3]


def test_help_lists_every_setting_with_its_default() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "millrace.cli", "up", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    for var in all_settings():
        assert var.name in said
        assert not var.default or f"{var.name} (default: {var.default})" in said
