"""The gateway as `millrace up` starts it, with short leases, killed at a step of a reservation if one is set.

CLUSTER_LEASE=3 CLUSTER_KILL_AT=reserved uvicorn tests.support.gateway.killable_app:application
"""

from __future__ import annotations

import os

from billing.reservations import budget_leases
from millrace.conf.asgi import application
from millrace.gateway.admission import budget_admission, early_release
from millrace.gateway.auth import authentication, revocation
from tests.support.gateway.kill_points import arm

__all__ = ["application"]

budget_leases.LEASE_SECONDS = float(os.environ["CLUSTER_LEASE"])
budget_leases.SETTLING_SECONDS = 0.5
revocation.POLL_SECONDS = float(os.environ["CLUSTER_POLL"])
authentication.FRESH_SECONDS = budget_admission.FRESH_SECONDS = 3 * revocation.POLL_SECONDS
early_release.MAX_AGE_SECONDS = 600.0  # longer than a test
budget_admission.REVOKE_LEASES_SECONDS = float(os.environ["CLUSTER_RECALL"])
if step := os.environ.get("CLUSTER_KILL_AT"):
    arm(step)
