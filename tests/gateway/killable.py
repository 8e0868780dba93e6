"""The gateway as `millrace up` starts it, with short leases, and killed at a step of a hold's life if one is named.

HOUSE_LEASE=3 HOUSE_KILL_AT=held uvicorn tests.gateway.killable:application
"""

from __future__ import annotations

import os

from billing import slices
from millrace.asgi import application
from tests.gateway.killing import arm

__all__ = ["application"]

slices.LEASE_SECONDS = float(os.environ["HOUSE_LEASE"])
slices.SETTLING_SECONDS = 0.5
if step := os.environ.get("HOUSE_KILL_AT"):
    arm(step)
