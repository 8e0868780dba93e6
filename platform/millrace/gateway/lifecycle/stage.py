"""The stages of a request: optional parts of its path, such as the answer cache or shadows (millrace.gateway.stages).

A stage has four hooks. A prompt of a request passes only through the stages whose `open` returns a `RequestStage`, so a
disabled stage costs one call, and enabling it needs no restart. The lifecycle calls the hooks of all open stages in the
order of the stages, and imports none of them.

A hook may reject the request with an `ApiError`. Any other exception is logged and counted; the stage releases what it
has reserved, and the request continues without it. If the stage protects something (`fails_closed`), the request fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

import structlog

from inference_worker.contract.messages import AnswerEvent, End
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.metrics import GatewayMetrics
from tenants.keys.snapshot import ApiKeySnapshot

if TYPE_CHECKING:
    from millrace.gateway.lifecycle.active_request import ActiveRequest

log = structlog.get_logger(__name__)

StageEvent = AnswerEvent | ApiError  # an event of the current execution, or the error that ends it
LAST = End, ApiError  # types of the last event
Result = TypeVar("Result")


class RequestStage:
    """The passage of one prompt of a request through a stage, with its state. Subclasses override the hooks they need.

    `on_close` may be called repeatedly. The other hooks are not called after it.
    """

    held: Sequence[AnswerEvent] = ()  # received events that were not passed on; if a hook fails, they are
    sees_tokens: bool = False  # `on_event` receives all events; otherwise the last one of each execution
    may_answer: bool = False  # `before_dispatch` may serve a request although no replica has capacity for it

    async def before_admission(self, active: ActiveRequest) -> None:
        """Prepare a request for its target, for each target that is tried."""

    async def before_dispatch(self, active: ActiveRequest, execution: Execution) -> bool:
        """Prepare an admitted execution. Return True if it is served without a replica."""
        return False

    async def on_event(self, active: ActiveRequest, event: StageEvent) -> Sequence[StageEvent]:
        """Receive an event of the current execution. Return the events that follow, for the next stage."""
        return (event,)

    async def on_close(self, *, is_billed: bool) -> None:
        """Release what the stage has reserved. If not `is_billed`, nothing that it ran beside the request is billed."""


class Stage(ABC):
    """A stage of one gateway, shared by its requests."""

    name: ClassVar[str]
    fails_closed: ClassVar[bool]  # whether a request fails if the stage does

    @abstractmethod
    def open(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> RequestStage | None:
        """Begin with a prompt of a request; None if it does not use this stage."""

    async def stop(self) -> None:
        """Cancel what runs beside the requests."""
        return


class RequestStages:
    """The open stages of one prompt of a request."""

    def __init__(
        self, request_id: str, metrics: GatewayMetrics, stages: Sequence[tuple[Stage, RequestStage]] = ()
    ) -> None:
        self._request_id = request_id
        self._failures = metrics.stage_failures
        self._open = list(stages)
        self.has_events = any(type(opened).on_event is not RequestStage.on_event for _, opened in stages)
        self.see_tokens = any(opened.sees_tokens for _, opened in stages)

    @property
    def is_empty(self) -> bool:
        """Return whether no stage is open."""
        return not self._open

    @property
    def may_answer(self) -> bool:
        """Return whether a stage may serve the request although no replica has capacity for it."""
        return any(opened.may_answer for _, opened in self._open)

    def find(self, name: str) -> RequestStage | None:
        """Return the open stage with this name."""
        return next((opened for stage, opened in self._open if stage.name == name), None)

    async def before_admission(self, active: ActiveRequest) -> None:
        for entry in tuple(self._open):
            await self._call(entry, "before_admission", entry[1].before_admission(active), None)

    async def before_dispatch(self, active: ActiveRequest, execution: Execution) -> bool:
        for entry in tuple(self._open):
            hook = entry[1].before_dispatch(active, execution)
            if await self._call(entry, "before_dispatch", hook, default=False) or execution.is_finished:
                return True
        return False

    async def on_event(self, active: ActiveRequest, event: StageEvent) -> Sequence[StageEvent]:
        """Return the events that the client receives."""
        events: Sequence[StageEvent] = (event,)
        for entry in tuple(self._open):
            passed: list[StageEvent] = []
            for each in events:
                is_awaited = entry[1].sees_tokens or isinstance(each, LAST)
                if not is_awaited or entry not in self._open:  # or it has failed
                    passed.append(each)
                    continue
                result = await self._call(entry, "on_event", entry[1].on_event(active, each), None)
                passed += _find_unpassed(entry[1].held, each) if result is None else result
            events = passed
        return events

    async def close(self, *, is_billed: bool = True) -> None:
        """Release what all stages have reserved."""
        for stage, opened in tuple(self._open):
            await self._close(stage, opened, is_billed=is_billed)

    async def _call(
        self, entry: tuple[Stage, RequestStage], hook: str, result: Awaitable[Result], default: Result
    ) -> Result:
        stage, opened = entry
        try:
            return await result
        except ApiError:
            raise
        except Exception:
            log.exception("stage_failed", stage=stage.name, hook=hook, request_id=self._request_id)
            self._failures.labels(stage.name, hook).inc()
            self._open.remove(entry)
            await self._close(stage, opened, is_billed=False)
            if stage.fails_closed:
                raise
            return default

    async def _close(self, stage: Stage, opened: RequestStage, *, is_billed: bool) -> None:
        """Close a stage. If that fails, repeat it once, so that nothing stays reserved."""
        for _ in range(2):
            try:
                return await opened.on_close(is_billed=is_billed)
            except Exception:
                log.exception("stage_failed", stage=stage.name, hook="on_close", request_id=self._request_id)
                self._failures.labels(stage.name, "on_close").inc()


class Stages:
    """The stages of one gateway, in the order in which a request passes through them."""

    def __init__(self, stages: Sequence[Stage], metrics: GatewayMetrics) -> None:
        self._stages = stages
        self._metrics = metrics
        self._none = RequestStages("", metrics)

    def open(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> RequestStages:
        """Begin with a prompt of a request."""
        found: list[tuple[Stage, RequestStage]] = []
        for stage in self._stages:
            try:
                opened = stage.open(key, request, request_id)
            except Exception:
                log.exception("stage_failed", stage=stage.name, hook="open", request_id=request_id)
                self._metrics.stage_failures.labels(stage.name, "open").inc()
                if stage.fails_closed:
                    raise
                continue
            if opened is not None:
                found.append((stage, opened))
        return RequestStages(request_id, self._metrics, found) if found else self._none

    async def stop(self) -> None:
        """Stop all stages, in the opposite order."""
        for stage in reversed(self._stages):
            await stage.stop()


def _find_unpassed(held: Sequence[AnswerEvent], event: StageEvent) -> Sequence[StageEvent]:
    """Return the events that a failed stage has not passed on: those that it held, and the one that it received."""
    if held and isinstance(held[-1], End):
        return held
    if isinstance(event, ApiError):
        return (event,)
    return held if held and held[-1] is event else (*held, event)
