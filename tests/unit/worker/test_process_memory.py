"""The release of code that a process does not run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from inference_worker.contract.process_memory import release_code


def resident_code() -> int:
    """Return the resident KiB of mapped files that are not writable."""
    total, is_code = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_code = "w" not in words[1] and len(words) > 5 and words[5].startswith("/")
        elif words[0] == "Rss:" and is_code:
            total += int(words[1])
    return total


def test_released_code_runs_again() -> None:
    matrix = np.arange(9.0).reshape(3, 3)
    want = np.linalg.svd(matrix)[1]
    before = resident_code()
    release_code()
    assert resident_code() < before / 2
    assert np.array_equal(np.linalg.svd(matrix)[1], want)
