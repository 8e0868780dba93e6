"""The answer cache as a stage: it serves answers that are cached, and stores those that were computed.

The stage fails open: after an internal error the answer is computed. An error of a guard is such an error, so a
semantic hit that could not be guarded is not served. If the usage of a hit is recorded when the error occurs, the
request fails and is not billed.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_worker.contract.messages import End
from millrace.gateway.answer_cache.answer_cache import ONLY_IF_CACHED, AnswerCache
from millrace.gateway.answer_cache.semantic_cache import Question
from millrace.gateway.core.asyncio_utils import BackgroundTasks, cancel_and_wait
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_ends import ExecutionEnds
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.stage import RequestStage, Stage, StageEvent
from tenants.keys.snapshot import ApiKeySnapshot


class CachedRequest(RequestStage):
    """One request's use of the answer cache."""

    def __init__(self, stage: AnswerCacheStage, question: Question | None, *, may_answer: bool) -> None:
        """Create a use. `question` is the request's lookup in the semantic cache."""
        self._stage = stage
        self._question = question
        self._execution: Execution | None = None  # the last one that was looked up
        self.may_answer = may_answer

    async def before_dispatch(self, active: ActiveRequest, execution: Execution) -> bool:
        active.question, self._execution = self._question, execution
        is_served = await self._stage.answers.serve(execution, active.request, active.key, self._question)
        if not is_served and active.rejection is not None:
            raise active.rejection
        return is_served

    async def on_event(self, active: ActiveRequest, event: StageEvent) -> Sequence[StageEvent]:
        if isinstance(event, End):
            if active.keeps_answer:
                self._stage.background.start(self._stage.answers.store(active.execution, self._question))
            else:
                await self._stage.answers.end_flight(active.execution)
        return (event,)

    async def on_close(self, *, is_billed: bool) -> None:
        if is_billed:
            return
        if self._execution is not None and not self._execution.is_finished:
            await self._stage.abandon(self._execution)
        if self._question is not None:
            await self._stage.answers.discard(self._question)


class AnswerCacheStage(Stage):
    """The answer cache of one gateway."""

    name = "answer_cache"
    fails_closed = False

    def __init__(self, answers: AnswerCache, ends: ExecutionEnds, background: BackgroundTasks) -> None:
        self.answers = answers
        self.background = background
        self._ends = ends

    def open(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> CachedRequest | None:
        is_used = key.answer_cache_seconds > 0
        if not is_used and ONLY_IF_CACHED not in request.cache_directives:
            return None
        question = self.answers.begin(key, request, request_id)  # its vector is computed while the request is routed
        return CachedRequest(self, question, may_answer=is_used)

    async def stop(self) -> None:
        await self.background.wait()
        await self.answers.stop()

    async def abandon(self, execution: Execution) -> None:
        """Take an execution out of the cache, so that it can run. If the usage of a hit is recorded already, end it."""
        lookup = execution.answer
        if lookup is None:
            return
        if lookup.following is not None:
            await cancel_and_wait([lookup.following])
        if lookup.usage is not None:
            await self._ends.end(execution, "internal_error")
            return
        await self.answers.end_flight(execution)
        execution.answer = None
