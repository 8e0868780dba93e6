"""manage.py seed_demo on a running platform: its live requests are run by the engine and metered."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.stack import Stack, eventually

ROOT = Path(__file__).resolve().parents[2]


def manage(stack: Stack, *words: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "DJANGO_"))}
    environ |= {"MILLRACE_DATA_DIR": str(stack.data_dir), "MILLRACE_PORT": str(stack.port)}
    done = subprocess.run(
        [sys.executable, "manage.py", *words], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_live_requests_are_completed_and_metered(stack):
    said = manage(stack, "seed_demo", "--events", "80", "--seconds", "120", "--requests", "16", "--allow-real-tenants")
    (answered,) = re.findall(r"\b200: (\d+)", said)
    assert int(answered) >= 8, said
    assert "500:" not in said

    def metered() -> bool:
        usage = manage(stack, "usage_report", "demo-harbor", "--by", "day")
        return int(usage.splitlines()[-2].split()[1]) > 0  # today

    eventually(metered)
