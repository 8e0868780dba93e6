"""Experiments: the arm of a request replaces the first target of its route.

The stage fails closed: a request without its arm would falsify the experiment, and could use a target that the
experiment excludes.
"""

from __future__ import annotations

from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.stage import RequestStage, Stage
from millrace.gateway.routing.router import Router
from tenants.keys.snapshot import ApiKeySnapshot


class AssignedRequest(RequestStage):
    """The assignment of one request to an arm."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._is_assigned = False

    async def before_admission(self, active: ActiveRequest) -> None:
        if self._is_assigned:  # another target of the same route is tried
            return
        self._is_assigned = True
        route = self._router.assign_arm(active.key, active.request, active.route)
        if route is not active.route:
            active.replace_route(route)


class ExperimentStage(Stage):
    """The running experiments of all tenants."""

    name = "experiments"
    fails_closed = True

    def __init__(self, router: Router) -> None:
        self._router = router

    def open(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> AssignedRequest | None:
        return AssignedRequest(self._router) if request.model in key.experiments else None
