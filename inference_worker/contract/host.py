"""The name of this machine, as reports and messages show it."""

from __future__ import annotations

import socket

MAX_HOST = 64  # characters of the name


def host_name() -> str:
    return socket.gethostname()[:MAX_HOST]
