"""The gateway as `millrace up` starts it, with short leases, and killed at a step of a hold's life if one is named.

HOUSE_LEASE=3 HOUSE_KILL_AT=held uvicorn tests.gateway.killable:application
"""

from __future__ import annotations

import os

from billing import slices
from millrace.asgi import application
from millrace.gateway import authentication, early_release, money, revocation
from tests.gateway.killing import arm

__all__ = ["application"]

slices.LEASE_SECONDS = float(os.environ["HOUSE_LEASE"])
slices.SETTLING_SECONDS = 0.5
revocation.POLL_SECONDS = float(os.environ["HOUSE_POLL"])
authentication.FRESH_SECONDS = money.FRESH_SECONDS = 3 * revocation.POLL_SECONDS
early_release.KEPT_SECONDS = 600.0  # longer than a test
money.RECALL_SECONDS = float(os.environ["HOUSE_RECALL"])
if step := os.environ.get("HOUSE_KILL_AT"):
    arm(step)
