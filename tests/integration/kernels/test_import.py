"""`kernels` must import where there is no Triton: the CPU backend lives without it."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = "import sys; sys.modules['triton'] = None; "


def test_kernels_import_without_triton() -> None:
    subprocess.run([sys.executable, "-c", BLOCKED + "import kernels, kernels.reference"], check=True)


def test_the_triton_kernels_say_what_they_lack() -> None:
    command = [sys.executable, "-c", BLOCKED + "import kernels.triton"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "triton" in result.stderr.splitlines()[-1]
