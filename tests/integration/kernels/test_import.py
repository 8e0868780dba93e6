"""`kernels` can be imported without Triton, since the CPU backend does not use it."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = "import sys; sys.modules['triton'] = None; "


def test_kernels_import_without_triton() -> None:
    subprocess.run([sys.executable, "-c", BLOCKED + "import kernels, kernels.reference"], check=True)


def test_the_error_of_triton_kernels_names_the_missing_package() -> None:
    command = [sys.executable, "-c", BLOCKED + "import kernels.triton"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "triton" in result.stderr.splitlines()[-1]
