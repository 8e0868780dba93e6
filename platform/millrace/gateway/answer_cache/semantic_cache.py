"""The semantic layer of the answer cache: cached answers to similar questions, under a bound of their error rate.

`begin` has the vector of a request's last turn computed, while the request is tokenized and routed. `find` compares it
with the questions of equal conversations and decides whether the nearest one's answer is served
(semantic_decision.py). `record` stores a computed answer. If the lookup had found a comparable entry, it also adds the
check of that entry to the tenant's evidence.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
import redis.asyncio as redis
import structlog

from inference_worker.contract.messages import AnswerEvent, End, Tokens
from millrace.apps.answer_caches.semantic_decision import Neighbor, band_of, margin
from millrace.gateway.answer_cache.answer_identity import similar_parts
from millrace.gateway.answer_cache.answer_rules import is_keepable
from millrace.gateway.answer_cache.answer_store import CachedAnswer
from millrace.gateway.answer_cache.embedder import QuestionEmbedder
from millrace.gateway.answer_cache.guards import MAX_GUARDED_CHARACTERS, differences
from millrace.gateway.answer_cache.semantic_store import (
    COMPARED_ANSWERS,
    Answer,
    CachedQuestion,
    ScopeEntries,
    SemanticStore,
)
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, LastTurn
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.protocols.last_turn import find_last_turn
from tenants.keys.snapshot import ApiKeySnapshot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

log = structlog.get_logger(__name__)

VERIFIED_SHARE = 0.05  # share of hits that are computed again
ANSWER_SIMILARITY = 0.9  # from which two answers are equal, if their texts differ
MAX_PENDING = 64  # questions of a gateway whose vectors are being computed; further requests are computed
MAX_TENANT_PENDING = 16  # pending questions of one tenant
VECTOR_SECONDS = 30.0
_FAILURES = (ApiError, psycopg.Error, redis.RedisError, OSError, TimeoutError)


@dataclass(eq=False)
class Question:
    """The last turn of a request, and the result of its lookup."""

    key: ApiKeySnapshot
    request_id: str
    turn: LastTurn
    embedding: str  # key of the embedding deployment
    vector_size: int
    vector: asyncio.Task[Vector | None]
    executions: list[Execution]  # executions that compute the vector
    nearest: CachedQuestion | None = None  # the nearest entry, if a check of it counts
    margin: float = 0.0
    neighbors: Sequence[int] = ()  # IDs of the nearest entries, nearest first
    is_hit: bool = False
    is_verified: bool = False  # the hit is computed again
    note: dict[str, Any] = field(default_factory=dict)  # the lookup's fields of the decision record

    def reset(self) -> None:
        """Forget the lookup of an earlier execution."""
        self.nearest, self.margin, self.neighbors, self.note = None, 0.0, (), {}
        self.is_hit = self.is_verified = False


class SemanticCache:
    """The semantic layer of one gateway."""

    def __init__(
        self,
        store: SemanticStore,
        embedder: QuestionEmbedder,
        wait_seconds: float,
        verified_share: float = VERIFIED_SHARE,
    ) -> None:
        """Create the layer. `wait_seconds` is how long a request waits for the vector of its question."""
        self._store = store
        self._embedder = embedder
        self._wait_seconds = wait_seconds
        self._verified_share = verified_share
        self._pending: dict[asyncio.Task[Vector | None], int] = {}  # task -> tenant

    def begin(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> Question | None:
        """Start to compute the vector of the request's last turn; None if the semantic cache is not used."""
        if not (key.serves_similar(request.model) and key.content_retention_days):
            return None
        tenants = list(self._pending.values())
        if len(tenants) >= MAX_PENDING or tenants.count(key.tenant_id) >= MAX_TENANT_PENDING:
            return None
        sampling = request.sampling
        if sampling.n != 1 or sampling.prompt_logprobs is not None:
            return None
        if sampling.temperature and not key.answer_cache_sampled:
            return None
        turn, model = find_last_turn(request), self._embedder.model
        if turn is None or model is None or len(turn.text) > MAX_GUARDED_CHARACTERS:
            return None
        executions: list[Execution] = []
        task = asyncio.create_task(self._vector(key, f"{request_id}.q", turn.text, on_start=executions.append))
        self._pending[task] = key.tenant_id
        task.add_done_callback(self._pending.pop)
        return Question(key, request_id, turn, model.key, model.vector_sizes[-1], task, executions)

    async def discard(self, question: Question) -> None:
        """Stop to compute the vector of a request that is not billed, and do not bill the vector."""
        await cancel_and_wait([question.vector])
        for execution in question.executions:
            await self._embedder.discard(execution)

    async def stop(self) -> None:
        """Cancel the computation of vectors."""
        await cancel_and_wait(list(self._pending))

    async def find(self, execution: Execution, question: Question) -> CachedAnswer | None:
        """Return the answer that is served to a similar question, or None. The question's note names the reason."""
        if execution.job.upstream is not None:
            question.note["miss"] = "upstream"
            return None
        tenant, scope = execution.tenant, self._scope(execution, question)
        try:
            async with asyncio.timeout(self._wait_seconds):
                reading = self._store.read_scope(tenant, scope, question.embedding, question.vector_size)
                entries, vector = await asyncio.gather(reading, asyncio.shield(question.vector))
                if vector is None or vector.size != question.vector_size:
                    question.note["miss"] = "no_vector"
                    return None
                entry = await self._find_nearest(tenant, scope, question, entries, vector)
        except TimeoutError:
            question.nearest, question.note = None, {"miss": "late"}
            return None
        except _FAILURES as exc:
            log.warning("semantic_lookup_failed", request_id=question.request_id, error=str(exc))
            question.note["miss"] = "unavailable"
            return None
        if entry is None:
            return None
        end = entry.answer.events[-1]
        max_error = question.key.semantic_cache_max_error_percent / 100
        if not entries.evidence.serves(question.margin, max_error):
            band = band_of(question.margin) or 0
            question.note |= {
                "miss": "evidence",
                "missing_checks": entries.evidence.bands[band].count_missing(max_error),
            }
            return None
        if not isinstance(end, End) or end.usage.output > execution.job.params.max_tokens:
            question.note["miss"] = "answer_too_long"
            return None
        question.is_hit = True
        question.is_verified = random.random() < self._verified_share  # noqa: S311  (a sample, not a secret)
        question.note["is_verified"] = question.is_verified
        return entry.answer

    async def record(
        self,
        execution: Execution,
        question: Question,
        events: Sequence[AnswerEvent],
        request_id: str,
        seconds: int,
        *,
        is_operator_paid: bool = False,
    ) -> None:
        """Add the check of the lookup's nearest entry to the evidence, then store the computed answer.

        Args:
            execution: that was looked up.
            events: of the computed answer.
            request_id: of the execution that computed it.
            seconds: lifetime of the entry; 0: the answer is not stored.
            is_operator_paid: the tenant does not pay for the answer's vector.
        """
        has_limit = execution.admitted.demand.request.max_tokens is not None  # the scope contains the limit
        if execution.job.upstream is not None or not is_keepable(events, 1, may_be_truncated=has_limit):
            return
        text = "".join(event.text for event in events if isinstance(event, Tokens))
        tenant, scope, key = execution.tenant, self._scope(execution, question), question.key
        try:
            vector = await asyncio.shield(question.vector)
            if vector is None or vector.size != question.vector_size:
                return
            answer_vector = await self._vector(key, f"{request_id}.a", text, is_operator_paid=is_operator_paid)
            packed = b"" if answer_vector is None else answer_vector.astype("float16").tobytes()
            answer = Answer(self._store.answer_digest(text), packed)
            group, nearest = 0, question.nearest
            if nearest is not None:
                is_correct = is_same_answer(answer, nearest.compared)
                group = nearest.group if is_correct else 0
                band = band_of(question.margin) or 0
                await self._store.add_check(
                    tenant, question.embedding, band, nearest.id, is_correct=is_correct, is_hit=question.is_hit
                )
            if not seconds:
                return
            if not group and question.neighbors:
                others = await self._store.read_answers(tenant, question.neighbors)
                group = next((number for number, other in others if is_same_answer(answer, other)), 0)
            cached = CachedAnswer(question.request_id, int(time.time()), list(events))
            lifetime = min(seconds, key.content_retention_days * 86_400)
            group = group or secrets.randbits(62)
            await self._store.add(tenant, scope, question.turn.text, vector, answer, group, cached, lifetime)
        except _FAILURES as exc:
            log.warning("semantic_answer_not_recorded", request_id=question.request_id, error=str(exc))

    async def _find_nearest(
        self, tenant: int, scope: bytes, question: Question, entries: ScopeEntries, vector: Vector
    ) -> CachedQuestion | None:
        """Return the nearest entry if a check of it counts: its margin is in a band and no guard finds a difference."""
        if not len(entries.ids):
            question.note["miss"] = "no_questions"
            return None
        similarities = entries.vectors @ vector
        order = (-similarities).argsort()
        question.neighbors = [entries.ids[place] for place in order[:COMPARED_ANSWERS]]
        first = int(order[0])
        neighbors = [Neighbor(float(similarities[first]), entries.groups[first], entries.wrong[first])]
        other = next((int(place) for place in order if entries.groups[place] != entries.groups[first]), None)
        if other is not None:
            neighbors.append(Neighbor(float(similarities[other]), entries.groups[other]))
        question.margin = margin(neighbors, complete=True)
        question.note |= {"similarity": round(neighbors[0].similarity, 4), "margin": round(question.margin, 4)}
        if band_of(question.margin) is None:
            question.note["miss"] = "margin"
            return None
        entry = await self._store.read_entry(tenant, scope, entries.ids[first])
        if entry is None:
            question.note["miss"] = "expired"
            return None
        question.note["request_id"] = entry.request_id
        if guards := differences(entry.question, question.turn.text):
            question.note |= {"miss": "guard", "guards": guards}
            return None
        question.nearest = entry
        return entry

    def _scope(self, execution: Execution, question: Question) -> bytes:
        """Return the identity of the questions that may be similar to this one."""
        return self._store.scope_id(similar_parts(execution, question.turn.context, question.embedding))

    async def _vector(
        self,
        key: ApiKeySnapshot,
        name: str,
        text: str,
        *,
        is_operator_paid: bool = False,
        on_start: Callable[[Execution], None] | None = None,
    ) -> Vector | None:
        """Return the vector of a text; None if it cannot be computed."""
        try:
            async with asyncio.timeout(VECTOR_SECONDS):
                return await self._embedder.embed(key, name, text, is_operator_paid=is_operator_paid, on_start=on_start)
        except _FAILURES as exc:
            log.info("vector_not_computed", execution=name, error=str(exc))
        except Exception:
            log.exception("vector_not_computed", execution=name)
        return None


def is_same_answer(first: Answer, second: Answer) -> bool:
    """Return whether two answers are equal: their normalized texts are, or their vectors are similar enough."""
    if first.digest == second.digest:
        return True
    if not first.vector or len(first.vector) != len(second.vector):
        return False
    import numpy as np

    vectors = [np.frombuffer(each.vector, np.float16).astype(np.float32) for each in (first, second)]
    return float(vectors[0] @ vectors[1]) >= ANSWER_SIMILARITY
