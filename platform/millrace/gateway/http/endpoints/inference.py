"""The inference endpoints: chat completions, completions, embeddings, rerank and score, and their base."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import structlog

from billing.currencies.amounts import FEMTO_DIGITS, decimal
from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.request import TokenCounts
from millrace.gateway.admission.idempotency import IdempotentCall
from millrace.gateway.answer_cache.answer_cache import read_directives
from millrace.gateway.core.content_encoding import decoded_pieces
from millrace.gateway.core.errors import ApiError, unknown_url
from millrace.gateway.core.request_body import too_large, without_mark
from millrace.gateway.core.types import InferenceRequest, ResponseSpec, Writer
from millrace.gateway.dispatch.stream_follower import StreamFollower, StreamNotFound
from millrace.gateway.dispatch.streams import STREAM_LOST
from millrace.gateway.http.client_paths import DEPLOYMENT
from millrace.gateway.http.consumer import ANY_METHOD, Headers, HttpConsumer
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.routing_facts import MAX_TASK_LENGTH
from millrace.gateway.lifecycle.success import SCHEMA
from millrace.gateway.protocols import rerank
from millrace.gateway.protocols.answer_validity import CheckedEnd, checked_events
from millrace.gateway.protocols.dialects import Dialect, requested_dialect
from millrace.gateway.protocols.openai import chat, completions, embeddings
from millrace.gateway.protocols.prompt_bounds import SMALL_BODY_BYTES
from tenants.keys.snapshot import ApiKeySnapshot

TASK_HEADER = b"x-millrace-task"


def read_task(header: bytes) -> str:
    """Return the task label of a request.

    Raises:
        ApiError: 400, it is too long.
    """
    task = header.decode("latin-1").strip()
    if len(task) > MAX_TASK_LENGTH:
        message = f"The header x-millrace-task may have at most {MAX_TASK_LENGTH} characters."
        raise ApiError("invalid_value", message, "x-millrace-task")
    return task


class PromptConsumer(HttpConsumer):
    """Base class of endpoints with a prompt.

    A large body is limited and charged before it is received, and decoded in a prompt process.
    """

    reader = ""  # key of `dialect_readers.READERS`

    async def read_request(self, key: ApiKeySnapshot) -> InferenceRequest:
        """Receive the body and read the request.

        Raises:
            ApiError: 413, the body is too large; 429, a limit is reached; other codes, the request is invalid.
        """
        deployment: Any = self.scope.get(DEPLOYMENT)
        body = _with_model(await self.read_body(), deployment)
        request = await self.gateway.prompts.read(key, self.reader, body)
        self.release_body()
        if self.trace is not None:
            self.trace.set_request(request, body)
        return request

    async def pieces(self) -> AsyncIterator[bytes]:
        max_bytes = self.gateway.settings.max_request_body_bytes
        if self.body.declared is not None:
            await self._charge(min(self.body.declared, max_bytes + 1))
        size = 0
        async for piece in without_mark(decoded_pieces(self.headers, self.body.pieces(max_bytes), max_bytes)):
            size += len(piece)
            await self._charge(max(size, self.body.received))
            yield piece

    async def _charge(self, size: int) -> None:
        """Charge a large body once, and reserve memory for it.

        Raises:
            ApiError: 413, it is larger than any prompt of this key can be; 429 or 503, it cannot be read now.
        """
        if size <= SMALL_BODY_BYTES or self.key is None:
            return
        if self.body_lease is None:
            await self.gateway.prompts.charge(self.key, size)
            self._max_body_bytes = self.gateway.prompts.max_body_bytes(self.key, self.reader)
            self.body_lease = self.gateway.body_memory.lease(self.key.tenant_id)
        if size > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        self.body_lease.grow(size)


class InferenceConsumer(PromptConsumer):
    """Base class of endpoints that run a request and send its response, streamed or complete."""

    dialect = ""
    recorded = True
    _active: ActiveRequest | None = None  # set when it was admitted

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        directives = read_directives(self.headers.get(b"x-millrace-cache"))
        request = await self.read_request(key)
        task = self.headers.get(TASK_HEADER)
        if directives or task:
            label = read_task(task) if task else ""
            request = msgspec.structs.replace(request, cache_directives=directives, task=label)
        if self.idempotent_call is None or not await self._resume(key, self.idempotent_call, request):
            await self._begin(key, request)

    async def final_usage(self) -> TokenCounts | None:
        return None if self._active is None else await self._active.final_usage()

    async def _begin(self, key: ApiKeySnapshot, request: InferenceRequest) -> None:
        active = await self.gateway.service.begin(key, request, self.dialect, self.request_id, self.trace)
        self._active = active
        try:
            events = self.gateway.service.events(active)
            # The status is sent with the first token, or by the heartbeat. Until then a failure is an HTTP status.
            if request.stream:
                self.begin_heartbeat(lambda: self._early_headers(active))
            first = await anext(events)
            self.limit_statuses = active.execution.admitted.limit_statuses
            layer, writer = _cache_layer(active, first), active.writer()
            headers = ignored_headers(active.ignored) + prompt_headers(active)
            await self._write(request, writer, active.model, layer, first, events, headers, lambda: _cost(active))
        except (ApiError, OSError):  # the request has ended, or the client has disconnected
            raise
        except Exception:
            await self.gateway.service.mark_failed(active)
            raise
        finally:
            is_returning = self.headers.get(b"x-millrace-resume") == b"1"
            if self.idempotent_call is not None and active.execution.written:
                is_returning = self.idempotent_call.keeps_running = True  # the next call with this key resumes it
            self.gateway.service.release(active, is_returning=is_returning and self.key_error is None)

    def _early_headers(self, active: ActiveRequest) -> Headers:
        """Return the headers of a stream without an event: those that do not depend on the model that answers."""
        self.limit_statuses = active.execution.admitted.limit_statuses
        return ignored_headers(active.ignored) + prompt_headers(active)

    async def _resume(self, key: ApiKeySnapshot, call: IdempotentCall, request: InferenceRequest) -> bool:
        """Resume the request that an earlier call with the same key started. Return False if it does not run."""
        if call.unfinished_request_id is None:
            return False
        follower = StreamFollower(self.gateway.dispatcher, call.unfinished_request_id, key.tenant_id, None)
        call.keeps_running = True
        new_request_id, self.request_id = self.request_id, call.unfinished_request_id
        async with self.gateway.subscribers.subscription(call.unfinished_request_id):
            if request.stream:
                self.begin_heartbeat(lambda: ignored_headers(request.analysis.ignored))
            try:
                events = checked_events(follower.events(), follower.response_spec)
                first = await anext(events)
                response_spec = await follower.response_spec()
            except (ApiError, StreamNotFound) as exc:  # it was not sent, failed or was cancelled
                call.keeps_running = False
                if self.heartbeat is not None:
                    await self.heartbeat.stop()
                if self._responding:  # the headers name the request that has failed
                    raise exc if isinstance(exc, ApiError) else ApiError("stream_lost", STREAM_LOST) from exc
                self.request_id = new_request_id
                await call.restart(self.request_id)
                return False
            if self.trace is not None:
                self.trace.replay_of = call.unfinished_request_id
            writer = self.gateway.service.writer(response_spec)
            headers = ignored_headers(request.analysis.ignored) + truncation_headers(response_spec)
            layer = _prefix_layer(first)
            await self._write(request, writer, response_spec.model, layer, first, events, headers)
        return True

    async def _write(
        self,
        request: InferenceRequest,
        writer: Writer,
        model: str,
        layer: str,
        first: AnswerEvent,
        events: AsyncIterator[AnswerEvent],
        more_headers: Headers,
        cost: Callable[[], Headers] = lambda: [],
    ) -> None:
        structlog.contextvars.bind_contextvars(model=model)
        headers = [(b"x-millrace-model", model.encode()), (b"x-millrace-cache", layer.encode())]
        if layer == "semantic" and self._active is not None:
            headers += _semantic_headers(self._active)
        headers += more_headers
        if request.stream:
            await self._stream(writer, headers, first, events)
        else:
            all_events = [first, *[later async for later in events]]
            headers += self._validity_headers(all_events[-1])
            await self.respond_json(200, writer.build_response(all_events), headers + cost())

    def _validity_headers(self, end: AnswerEvent) -> Headers:
        """Return the header with the validity of an answer whose schema is enforced in part. Record a failure."""
        if not isinstance(end, CheckedEnd):
            return []
        if self.trace is not None and not end.schema_valid:
            self.trace.failure = SCHEMA
        return [(b"x-millrace-schema-valid", b"true" if end.schema_valid else b"false")]

    async def _stream(
        self, writer: Writer, headers: Headers, event: AnswerEvent, events: AsyncIterator[AnswerEvent]
    ) -> None:
        sent, self.writer = 0, writer
        await self.begin_events(headers)
        while True:
            chunks, is_last = writer.stream(event), isinstance(event, End)
            if is_last:
                self._validity_headers(event)
            if chunks:
                await self.send_events(chunks, sent, last=is_last)
                sent += len(chunks)
            if is_last:
                return
            event = await anext(events)


def _cache_layer(active: ActiveRequest, first: AnswerEvent) -> str:
    """Return the cache layer that the answer comes from, in the words of the header x-millrace-cache."""
    lookups = [part.execution.answer for part in (active, *active.further_prompts)]
    layers = {"" if lookup is None else lookup.layer for lookup in lookups}
    return layers.pop() if len(layers) == 1 and "" not in layers else _prefix_layer(first)


def _semantic_headers(active: ActiveRequest) -> Headers:
    """Return the headers with the similarity of a semantic hit and the request that its answer is from."""
    lookup = active.execution.answer
    if lookup is None or lookup.similarity is None:
        return []
    similarity = (b"x-millrace-cache-similarity", f"{lookup.similarity:.4f}".encode())
    return [similarity, (b"x-millrace-cache-source", lookup.source.encode())]


def _prefix_layer(first: AnswerEvent) -> str:
    is_cached = isinstance(first, Tokens) and first.prompt is not None and first.prompt.cache_read
    return "prefix" if is_cached else "miss"


def _with_model(body: bytes, deployment: str | None) -> bytes:
    """Return the body with the model that an Azure path names, if it names one. The last of equal keys is used."""
    text = body.rstrip()
    if deployment is None or not text.endswith(b"}"):
        return body
    start = text[:-1]
    separator = b"" if start.strip() == b"{" else b","
    return b'%s%s"model":%s}' % (start, separator, msgspec.json.encode(deployment))


def ignored_headers(ignored: Sequence[str]) -> Headers:
    """Return the header that names the ignored fields of a request, if there are any."""
    return [(b"x-millrace-ignored", ", ".join(ignored).encode())] if ignored else []


def prompt_headers(active: ActiveRequest) -> Headers:
    """Return the headers with what was left out of the prompt."""
    headers = truncation_headers(active.execution.response_spec)
    if dropped := active.prompt.dropped_messages:
        headers.append((b"x-millrace-dropped-messages", str(dropped).encode()))
    return headers


def truncation_headers(response_spec: ResponseSpec) -> Headers:
    """Return the header with the number of truncated inputs, if there are any."""
    return [(b"x-millrace-truncated", response_spec.truncated.encode())] if response_spec.truncated else []


def _cost(active: ActiveRequest) -> Headers:
    """Return the exact cost of the request in USD, as a header."""
    femto = 0
    for part in (active, *active.further_prompts):
        if part.execution.usage is None:
            return []
        for execution in (*part.side_executions, *part.executions):
            admitted, usage = execution.admitted, execution.usage
            if admitted.rate_card is None:
                return []
            if usage is not None:  # otherwise it failed before a fallback
                femto += admitted.rate(usage).cost_femto
    return [(b"x-millrace-cost-usd", decimal(femto, FEMTO_DIGITS).encode())]


class ChatCompletions(InferenceConsumer):
    endpoint = "chat.completions"
    dialect = reader = chat.DIALECT


class Completions(InferenceConsumer):
    endpoint = "completions"
    dialect = reader = completions.DIALECT


class Embeddings(InferenceConsumer):
    endpoint = "embeddings"
    dialect = reader = embeddings.DIALECT


class Rerank(InferenceConsumer):
    endpoint = "rerank"
    dialect = reader = rerank.RERANK


class Score(InferenceConsumer):
    endpoint = "score"
    dialect = reader = rerank.SCORE


class Unknown(HttpConsumer):
    """The response to every other path under /v1."""

    endpoint = "unknown"
    method = ANY_METHOD

    def choose_dialect(self) -> Dialect:
        return requested_dialect(self.scope["path"], self.headers)

    async def handle(self) -> None:
        raise unknown_url(self.http_method, self.scope["path"], self.gateway.settings.base_url)
