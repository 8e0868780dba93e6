"""The answer cache of the gateway: exact hits, equal requests that are computed once, and semantic hits.

`serve` answers an admitted execution from the cache, or lets it follow an equal execution that runs. Otherwise the
execution runs, and `store` keeps its answer. The usage of a hit is recorded in Valkey before its first event is
returned, under the execution's ID. So a hit is billed once or not at all, whenever the gateway fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import redis.asyncio as redis
import structlog

from billing.currencies.amounts import FEMTO_A_NANO
from billing.rates.pricing import Component, price, prices
from inference_worker.contract.messages import (
    AnswerEvent,
    End,
    ExecutionUsage,
    Failed,
    Tokens,
    claim_key,
    gateway_stream,
)
from inference_worker.contract.request import TokenCounts
from millrace.gateway.answer_cache.answer_identity import exact_parts
from millrace.gateway.answer_cache.answer_rules import is_keepable
from millrace.gateway.answer_cache.answer_store import AnswerStore, CachedAnswer
from millrace.gateway.answer_cache.semantic_cache import Question, SemanticCache
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import ApiError, unavailable
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.dispatch.answer_lookup import AnswerLookup
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_state import ExecutionState
from millrace.gateway.dispatch.streams import EventsLost, read_log
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.02  # how often a follower reads the log of its leader
UNWRITTEN_SECONDS = 60.0  # how long a leader may wait in its gateway's queue
NO_STORE, NO_CACHE, ONLY_IF_CACHED = "no-store", "no-cache", "only-if-cached"
UNPRICED = "unpriced"
DIRECTIVES = (NO_STORE, NO_CACHE, ONLY_IF_CACHED)


def read_directives(header: bytes | None) -> frozenset[str]:
    """Return the directives of the request header `x-millrace-cache`.

    Raises:
        ApiError: 400, a directive is unknown.
    """
    directives = {part.strip().lower() for part in (header or b"").decode("latin-1").split(",")} - {""}
    if unknown := sorted(directives - set(DIRECTIVES)):
        message = f"Unknown directive {unknown[0]!r} in the header x-millrace-cache; use {', '.join(DIRECTIVES)}."
        raise ApiError("invalid_value", message, "x-millrace-cache")
    return frozenset(directives)


class AnswerCache:
    """The answer cache of one gateway."""

    def __init__(self, store: AnswerStore, dispatcher: Dispatcher, semantic: SemanticCache | None = None) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._semantic = semantic

    def begin(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> Question | None:
        """Start to compute the vector of the request's question, if similar questions may receive its answer."""
        if self._semantic is None or (NO_CACHE in request.cache_directives and not _may_store(key, request)):
            return None
        return self._semantic.begin(key, request, request_id)

    async def discard(self, question: Question) -> None:
        """Do not bill the vector of a request that is not billed."""
        if self._semantic is not None:
            await self._semantic.discard(question)

    async def stop(self) -> None:
        """Stop the semantic layer."""
        if self._semantic is not None:
            await self._semantic.stop()

    async def serve(
        self, execution: Execution, request: InferenceRequest, key: ApiKeySnapshot, question: Question | None = None
    ) -> bool:
        """Serve the execution from the cache if possible. Return False if it must run.

        Raises:
            ApiError: 412, the request must not run and its answer is not cached; 503, the hit could not be recorded.
        """
        if question is not None:
            question.reset()
        if not key.answer_cache_seconds:
            self._require_run(request)
            return False
        reason = _miss_reason(execution, request, key)
        execution.decision_record.answer_cache = note = dict[str, Any]()
        stored = key.answer_cache_seconds if _may_store(key, request) else 0
        if NO_STORE in request.cache_directives:
            note["no_store"] = True
        elif not stored:
            note["not_replaced"] = True
        if reason:
            note["miss"] = reason
            if reason == UNPRICED and execution.batch:  # requests of other classes can use the answer
                execution.answer = self._lookup(execution, stored)
            self._require_run(request)
            return False
        execution.answer = lookup = self._lookup(execution, stored)
        answer = await self._find(execution, lookup, request)
        if answer is not None and await self._replay(execution, lookup, answer):
            return True
        if lookup.following is not None:
            note.update(layer="single_flight")
            return True
        note["miss"] = NO_CACHE if NO_CACHE in request.cache_directives else "not_cached"
        if question is not None and self._semantic is not None and NO_CACHE not in request.cache_directives:
            similar = await self._semantic.find(execution, question)
            note["semantic"] = question.note
            if similar is not None:
                await self._replay(execution, lookup, similar, question)
                await self.end_flight(execution)
                return True
        self._require_run(request)
        return False

    async def store(self, execution: Execution, question: Question | None = None) -> None:
        """Store the answer of an execution that ran, if it may be kept, and end its flight."""
        lookup = execution.answer
        if lookup is None or lookup.layer:
            return
        is_partial = execution.whole_prompt is not None and not execution.has_summary  # later answers have a summary
        if is_partial or not is_keepable(lookup.events, execution.job.params.n):
            await self.end_flight(execution)
            return
        leader, lookup.leader = lookup.leader, ""
        answer = CachedAnswer(execution.request_id, int(time.time()), lookup.events)
        try:
            await self._store.store(execution.tenant, lookup.answer_id, leader, answer, lookup.seconds)
        except (redis.RedisError, OSError) as exc:
            log.warning("answer_not_stored", request_id=execution.request_id, error=str(exc))
        if question is not None and self._semantic is not None:
            await self._semantic.record(execution, question, lookup.events, execution.request_id, lookup.seconds)

    async def record_check(
        self, hit: Execution, question: Question, events: Sequence[AnswerEvent], *, is_operator_paid: bool
    ) -> None:
        """Record the computed answer to the request of a semantic hit. The operator may pay for its vector."""
        if self._semantic is not None and hit.answer is not None:
            seconds = hit.answer.seconds
            await self._semantic.record(
                hit, question, events, f"{hit.request_id}.v", seconds, is_operator_paid=is_operator_paid
            )

    async def end_flight(self, execution: Execution) -> None:
        """End the flight that the execution leads, if it does, so that no other request waits for its answer."""
        lookup = execution.answer
        if lookup is None or not lookup.leader:
            return
        leader, lookup.leader = lookup.leader, ""
        try:
            await self._store.end_flight(execution.tenant, lookup.answer_id, leader)
        except (redis.RedisError, OSError) as exc:
            log.warning("answer_flight_not_ended", request_id=execution.request_id, error=str(exc))

    async def end(self, execution: Execution) -> bool:
        """End an execution whose client has disconnected, and bill what the client received of a hit.

        Returns:
            False if the execution runs and must be cancelled.
        """
        lookup = execution.answer
        if lookup is None or not lookup.layer:
            return False
        if lookup.following is not None:
            await cancel_and_wait([lookup.following])
            if not lookup.layer:  # it has replaced its leader meanwhile
                return False
        execution.advance(ExecutionState.FINISHED)
        if lookup.usage is None:
            received = sum(len(each.token_ids) for each in lookup.sent.values())
            if received:
                replaced = TokenCounts(execution.admitted.demand.prompt_tokens, output=received)
                with contextlib.suppress(ApiError):  # it is not billed if its usage could not be recorded
                    await self._record(execution, lookup, replaced, "cancelled", "cancelled")
            else:
                await self._dispatcher.record_not_started(execution.job.billing_context)
        execution.usage = lookup.usage
        return True

    def _require_run(self, request: InferenceRequest) -> None:
        if ONLY_IF_CACHED in request.cache_directives:
            raise ApiError("not_cached", "The answer is not cached. Send the request without only-if-cached.")

    def _lookup(self, execution: Execution, seconds: int) -> AnswerLookup:
        return AnswerLookup(self, self._store.answer_id(exact_parts(execution)), seconds)

    async def _find(self, execution: Execution, lookup: AnswerLookup, request: InferenceRequest) -> CachedAnswer | None:
        """Return the cached answer. If there is none, lead or follow a flight, if the request permits it."""
        if NO_CACHE in request.cache_directives:
            return None
        own = f"{execution.request_id} {execution.execution} {self._dispatcher.gateway_id}"
        # Events of an upstream have no tokens, by which the part that a follower received could be billed.
        leads = not (request.cache_directives or execution.batch or execution.job.upstream)
        try:
            answer, leader = await self._store.find(execution.tenant, lookup.answer_id, own if leads else "")
        except (redis.RedisError, OSError) as exc:
            log.warning("answer_cache_unreachable", error=str(exc))
            return None
        if leader == own:
            lookup.leader = own
        elif leader:
            lookup.layer = "single_flight"
            lookup.following = asyncio.create_task(self._follow(execution, lookup, leader, own))
        return answer

    async def _replay(
        self, execution: Execution, lookup: AnswerLookup, answer: CachedAnswer, question: Question | None = None
    ) -> bool:
        """Record the usage of an exact hit, or of a semantic hit with its question, then replay its events.

        Raises:
            ApiError: 503, the usage could not be recorded.
        """
        end = answer.events[-1]
        if not isinstance(end, End):
            return False
        lookup.layer, lookup.source = "exact", answer.request_id
        age = int(time.time()) - answer.stored_at
        note: dict[str, Any] = {"layer": lookup.layer, "request_id": answer.request_id, "age_seconds": age}
        replaced = end.usage
        if question is not None:
            lookup.layer, lookup.similarity = "semantic", question.note["similarity"]
            note |= {"layer": lookup.layer, **question.note}
            replaced = TokenCounts(execution.admitted.demand.prompt_tokens, output=end.usage.output)
        if not lookup.seconds:
            note["no_store"] = True
        execution.decision_record.answer_cache = note  # before the record is written
        await self._record(execution, lookup, replaced, "completed", end.finish_reason)
        events = (_as_hit(event, execution, seq, replaced) for seq, event in enumerate(answer.events))
        execution.buffer.replay(events)
        execution.advance(ExecutionState.ENDED)
        return True

    async def _record(
        self, execution: Execution, lookup: AnswerLookup, replaced: TokenCounts, outcome: str, finish_reason: str
    ) -> None:
        """Record the usage of a hit that replaces a computation with these counts.

        Raises:
            ApiError: 503, Valkey is unavailable. The usage is reversed in case it was recorded after all.
        """
        usage = _hit_usage(replaced)
        context, gateway = execution.job.billing_context, f"gateway.{self._dispatcher.gateway_id}"
        event = ExecutionUsage(context, execution.attempt, outcome, finish_reason, usage, gateway, 0)
        try:
            await self._dispatcher.record_hit(execution, event)
        except (redis.RedisError, OSError) as exc:
            log.warning("answer_hit_not_recorded", request_id=execution.request_id, error=str(exc))
            execution.advance(ExecutionState.FINISHED)
            await self._dispatcher.force_fail(execution.job, execution.attempt, "internal_error")
            raise unavailable() from exc
        lookup.usage = usage

    # An execution that follows an equal one.

    async def _follow(self, execution: Execution, lookup: AnswerLookup, leader: str, own: str) -> None:
        """Pass the leader's events to the execution. If the leader fails, become the leader or follow another one."""
        try:
            lookup.source = leader.split()[0]
            while not await self._pass_events(execution, lookup, leader):
                lookup.leader = own  # from here on, other requests may wait for this one
                leader = await self._store.succeed(execution.tenant, lookup.answer_id, leader, own)
                execution.buffer.restart(execution.attempt)
                lookup.restart()
                if leader == own:
                    self._run(execution, lookup)
                    return
                lookup.leader, lookup.source = "", leader.split()[0]
        except ApiError as exc:
            await self._fail(execution, exc)
        except (redis.RedisError, OSError) as exc:
            log.warning("answer_cache_unreachable", error=str(exc))
            await self._fail(execution, unavailable())
        except Exception:
            log.exception("answer_flight_failed", request_id=execution.request_id)
            message = "The server had an internal error. Send the request again."
            await self._fail(execution, ApiError("internal_error", message))

    async def _pass_events(self, execution: Execution, lookup: AnswerLookup, leader: str) -> bool:
        """Pass the events of the leader's log, as they arrive. Return False if the leader has failed.

        Raises:
            ApiError: the execution's deadline has passed; 503, the usage could not be recorded.
        """
        broker = self._dispatcher.broker
        request_id, number, gateway = leader.split()
        attempt = next_seq = 0
        unwritten_until = time.monotonic() + UNWRITTEN_SECONDS
        while True:
            claim: Any = await broker.hmget(claim_key(request_id, int(number)), "attempt", "state", "owner")
            current, state, owner = claim
            if current is None:  # its gateway has not sent it yet
                if time.monotonic() > unwritten_until or not await broker.exists(gateway_stream(gateway)):
                    return False
                if not await self._store.is_leader(execution.tenant, lookup.answer_id, leader):
                    return False
                await _wait(execution)
                continue
            if int(current) != attempt:
                if next_seq:
                    return False
                attempt = int(current)
            try:
                events = await read_log(broker, request_id, attempt, next_seq)
            except EventsLost:
                return False
            for event in events:
                if isinstance(event, Failed) or (isinstance(event, End) and event.finish_reason == "cancelled"):
                    return False
                while execution.buffer.is_full:
                    await _wait(execution)
                if isinstance(event, End):
                    await self._record(execution, lookup, event.usage, "completed", event.finish_reason)
                    execution.advance(ExecutionState.ENDED)
                execution.buffer.put(_as_hit(event, execution, next_seq))
                next_seq += 1
                if isinstance(event, End):
                    return True
            if not events:
                if state in (b"failed", b"cancelled", b"done"):
                    return False
                if owner is not None and self._dispatcher.replicas.is_lost(owner.decode()):
                    return False
                if owner is None and not await broker.exists(gateway_stream(gateway)):
                    return False
                await _wait(execution)

    def _run(self, execution: Execution, lookup: AnswerLookup) -> None:
        """Run the execution instead of its leader.

        Raises:
            ApiError: 503, the tenant's queue is full.
        """
        lookup.layer = lookup.source = ""
        execution.decision_record.answer_cache = {"miss": "leader_failed"}
        self._dispatcher.submit(execution)

    async def _fail(self, execution: Execution, error: ApiError) -> None:
        execution.advance(ExecutionState.FINISHED)
        execution.retry_after = error.retry_after
        await self._dispatcher.record_not_started(execution.job.billing_context)
        execution.buffer.fail(error.code, error.message, unsent=True)


def _may_store(key: ApiKeySnapshot, request: InferenceRequest) -> bool:
    """Return whether the answer may be stored. With `no-cache` it can replace one, for which a key needs a scope."""
    directives = request.cache_directives
    return NO_STORE not in directives and (NO_CACHE not in directives or key.may_replace_answers)


def _miss_reason(execution: Execution, request: InferenceRequest, key: ApiKeySnapshot) -> str:
    """Return why the cache is not used for the execution; empty if it is."""
    admitted, params = execution.admitted, execution.job.params
    if not admitted.demand.sequences or execution.job.hides_output:
        return "not_generated"
    if params.temperature and not key.answer_cache_sampled:
        return "sampled"
    if {NO_STORE, NO_CACHE} <= request.cache_directives:
        return NO_STORE
    if admitted.rate_card is not None:
        at, prompt_tokens = admitted.demand.admitted_at, admitted.demand.prompt_tokens
        if (
            not {Component.ANSWER_HIT_INPUT, Component.ANSWER_HIT_OUTPUT}
            <= prices(admitted.rate_card, prompt_tokens, at).keys()
        ):
            return UNPRICED
        if admitted.reserved_nano is not None:
            most = _hit_usage(TokenCounts(prompt_tokens, output=params.max_tokens * params.n))
            if price(admitted.rate_card, most, at).cost_femto > admitted.reserved_nano * FEMTO_A_NANO:
                return UNPRICED
    return ""


async def _wait(execution: Execution) -> None:
    """Wait until the log is read again.

    Raises:
        ApiError: the execution's deadline has passed.
    """
    if time.time() > execution.job.deadline:
        raise ApiError("timeout", "The request exceeded its deadline.")
    await asyncio.sleep(POLL_SECONDS)


def _hit_usage(replaced: TokenCounts) -> TokenCounts:
    """Return the usage of a hit that replaces a computation with these counts."""
    return TokenCounts(answer_hit_input=replaced.prompt, answer_hit_output=replaced.output)


def _as_hit(event: AnswerEvent, execution: Execution, seq: int, replaced: TokenCounts | None = None) -> AnswerEvent:
    """Return an event of the answer as one of the execution. Its usage reports the prompt as read from the cache.

    Args:
        replaced: the usage of the computation that the hit replaces; None: that of the event.
    """
    event = msgspec.structs.replace(event, request_id=execution.request_id, attempt=execution.attempt, seq=seq)
    if isinstance(event, Tokens) and event.prompt is not None:
        return msgspec.structs.replace(event, prompt=TokenCounts(cache_read=(replaced or event.prompt).prompt))
    if isinstance(event, End):
        usage = TokenCounts(cache_read=(replaced or event.usage).prompt, output=event.usage.output)
        return msgspec.structs.replace(event, usage=usage, accepted_drafts=0, rejected_drafts=0)
    return event
