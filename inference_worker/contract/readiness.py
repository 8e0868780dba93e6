"""The report of a process that it has started, to the supervisor that waits for it (`millrace up`).

The supervisor gives the process the write end of a pipe, and its number in the environment. Without it nothing is
reported, as under systemd or Kubernetes.
"""

from __future__ import annotations

import contextlib
import os

READY_FD = "READY_FD"  # not MILLRACE_…: it is no setting


def report_ready() -> None:
    """Report that this process does its work from now on. Later calls have no effect."""
    number = os.environ.pop(READY_FD, "")
    if not number.isdecimal():
        return
    with contextlib.suppress(OSError):  # the supervisor has ended
        os.write(int(number), b"\n")
    with contextlib.suppress(OSError):
        os.close(int(number))
