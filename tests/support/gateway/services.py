"""Inference services with all stages, for tests."""

from __future__ import annotations

from typing import Any

import msgspec
import redis.asyncio as redis

from millrace.environment.configuration import platform_settings
from millrace.gateway.admission.admission import RateLimitAdmission
from millrace.gateway.admission.disk import DiskWatch
from millrace.gateway.answer_cache.answer_cache import AnswerCache
from millrace.gateway.answer_cache.answer_store import AnswerStore
from millrace.gateway.answer_cache.side_executions import SideExecutions
from millrace.gateway.assembly import ServiceParts
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.dispatch.stream_subscribers import StreamSubscribers
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.lifecycle.stage import Stage
from millrace.gateway.routing.router import Router
from tests.support.gateway.replica import GATEWAY


class ComparisonList(list[Any]):
    """The comparisons of shadows, instead of a request log."""

    add_shadow = list.append


def make_parts(
    broker: redis.Redis, router: Router, admission: RateLimitAdmission, dispatcher: Dispatcher, **changes: Any
) -> ServiceParts:
    """Return the parts of a service. `changes` replace some of them."""
    settings, jobs = platform_settings(), InferenceJobBuilder(GATEWAY, "secret", 60)
    parts: dict[str, Any] = {
        "metrics": GatewayMetrics(dispatcher.replicas),
        "jobs": jobs,
        "answers": AnswerCache(AnswerStore(broker, "secret", 60), dispatcher),
        "side_executions": SideExecutions(admission, dispatcher, jobs),
        "disk": DiskWatch(settings.data_dir, settings.min_free_disk),
        "request_log": ComparisonList(),
        "active_requests": ActiveRequests(),
        "subscribers": StreamSubscribers(broker),
    }
    return ServiceParts(router=router, admission=admission, dispatcher=dispatcher, **parts | changes)


def recorded(active: ActiveRequest) -> dict[str, Any]:
    """Return the decision record of a request as it is stored."""
    return dict(msgspec.json.decode(msgspec.json.encode(active.decision_record)))


def find_opened(active: ActiveRequest, name: str) -> Any:
    """Return the request's passage through the stage with this name; None if it is not open."""
    return active.stages.find(name)


def replace_stage(service: InferenceService, stage: Stage) -> None:
    """Replace the stage of the same name."""
    stages = list(service._stages._stages)
    (place,) = (number for number, each in enumerate(stages) if each.name == stage.name)
    stages[place] = stage
    service._stages._stages = stages


def find_stage(service: InferenceService, name: str) -> Any:
    """Return the stage with this name."""
    return next(stage for stage in service._stages._stages if stage.name == name)
