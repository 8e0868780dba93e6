"""The request log: a record of each request (millrace.apps.request_log), buffered in memory and written once a second.

No request waits for it or fails with it. While the database is unavailable, the newest `MAX_PENDING_RECORDS` are
buffered and the rest is counted as dropped. If a gateway is killed, up to a second of records is lost. The records are
telemetry: billing does not use them. Prompts and completions are stored only if the tenant has enabled this.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import structlog

from millrace.gateway.admission.limits import ENFORCED
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.limit_status import LimitStatus
from millrace.gateway.core.request_db import TenantConnectionPool
from millrace.gateway.lifecycle.success import success_signals
from tenants.keys.snapshot import ApiKeySnapshot

if TYPE_CHECKING:
    from millrace.gateway.core.types import InferenceRequest
    from millrace.gateway.dispatch.execution import Execution
    from millrace.gateway.dispatch.metrics import GatewayMetrics
    from millrace.gateway.lifecycle.active_request import ActiveRequest

log = structlog.get_logger(__name__)

FLUSH_SECONDS = 1.0
STOP_SECONDS = 2.0  # for the last records when the gateway stops
INSERT_BATCH_SIZE = 200  # rows in a statement
MAX_PENDING_RECORDS = 10_000  # waiting for the database
MAX_PENDING_CONTENTS = 500
MAX_PENDING_SHADOWS = 2_000
MAX_MODEL_NAME_LENGTH = 128  # characters of a requested model name
MAX_LISTED = 24  # limits, skipped models and placements, each
MAX_CONTENT_CHARACTERS = 65_536  # characters of a request, and of its completions
LIMITED = frozenset({"rate_limit_exceeded", "budget_exceeded", "quota_exceeded", "credit_balance_exhausted"})
_LAYERS = ("", "computed", "prefix", "semantic", "single_flight", "exact")  # empty: no usage is known
_ROUTE = (
    *("policy", "targets", "prompt_tokens", "facts", "skipped", "escalations", "not_escalating", "retry_budget"),
    *("dropped_messages", "summary", "not_summarizing", "answer_cache", "decided_at", "experiment", "classifier"),
    *("shadow", "not_shadowing", "sampling_defaults", "truncated_inputs"),
)


class Record(msgspec.Struct, kw_only=True):
    """A row of request_log_requestrecord. Times are microseconds since 1970."""

    tenant_id: int
    started_at: int
    request_id: str
    project_id: int
    key_id: int
    gateway_id: str
    endpoint: str
    requested_model: str
    served_model: str
    stream: bool
    status: str
    code: str
    outcome: str
    limited_by: Mapping[str, Any] | None
    limits: list[dict[str, Any]]
    budget_periods: Sequence[int]
    route: dict[str, Any]
    placements: list[dict[str, Any]]
    prompts: int
    prompt_tokens: int | None
    max_tokens: int | None
    reserved_nano: int | None
    price_version: int | None
    total_ms: int
    ttft_ms: int | None
    dry_run_rejections: int
    replay_of: str
    ignored: Sequence[str]
    cache_layer: str
    cache_source: str
    batch_id: int | None
    batch_line: int | None
    end_user: str = ""
    failure: str = ""
    retry_key: int | None = None
    itl_us: int | None = None
    experiment_id: int | None = None
    experiment_arm: int | None = None
    experiment_unit: str = ""


class LoggedContent(msgspec.Struct):
    """A row of request_log_requestcontent."""

    tenant_id: int
    request_id: str
    started_at: int
    body: str
    answers: list[str]
    truncated: bool


class ShadowRecord(msgspec.Struct):
    """A row of request_log_shadowcomparison. Costs are decimal numbers in femto-USD."""

    tenant_id: int
    started_at: int
    request_id: str
    requested_model: str
    policy_version: int
    served_model: str
    shadow_model: str
    is_operator_paid: bool
    code: str
    has_schema: bool
    failure: str
    output_tokens: int
    cost_femto: str | None
    ttft_ms: int | None
    total_ms: int | None
    shadow_failure: str = ""
    shadow_output_tokens: int | None = None
    shadow_cost_femto: str | None = None
    shadow_ttft_ms: int | None = None
    shadow_total_ms: int | None = None


_TYPES = {
    **dict.fromkeys(("tenant_id", "started_at", "project_id", "key_id", "reserved_nano"), "bigint"),
    **dict.fromkeys(("price_version", "batch_id", "retry_key", "experiment_id"), "bigint"),
    **dict.fromkeys(("prompt_tokens", "max_tokens", "total_ms", "ttft_ms", "batch_line", "itl_us"), "integer"),
    **dict.fromkeys(("prompts", "dry_run_rejections", "experiment_arm"), "smallint"),
    **dict.fromkeys(("stream", "truncated", "is_operator_paid", "has_schema"), "boolean"),
    **dict.fromkeys(("policy_version", "output_tokens", "shadow_output_tokens"), "integer"),
    **dict.fromkeys(("shadow_ttft_ms", "shadow_total_ms"), "integer"),
    **dict.fromkeys(("cost_femto", "shadow_cost_femto"), "numeric"),
    **dict.fromkeys(("limited_by", "limits", "budget_periods", "route", "placements", "answers", "ignored"), "jsonb"),
}


def _insert(table: str, row: type[msgspec.Struct]) -> str:
    """Return an INSERT whose parameter is a JSON array of rows. Existing rows stay unchanged."""
    names = row.__struct_fields__
    instant = "timestamptz 'epoch' + started_at * interval '1 microsecond'"
    values = ", ".join(instant if name == "started_at" else name for name in names)
    columns = ", ".join(f"{name} {_TYPES.get(name, 'text')}" for name in names)
    return (
        f"INSERT INTO {table} ({', '.join(names)}) SELECT {values}"  # noqa: S608  (names are the structs' own)
        f" FROM jsonb_to_recordset(%s::jsonb) AS r ({columns}) ON CONFLICT DO NOTHING"
    )


_INSERT_RECORDS = _insert("request_log_requestrecord", Record)
_INSERT_CONTENTS = _insert("request_log_requestcontent", LoggedContent)
_INSERT_SHADOWS = _insert("request_log_shadowcomparison", ShadowRecord)
encode_row = msgspec.json.Encoder().encode


class RequestTrace:
    """The data of a request's record, collected while the request runs. Created as soon as its key is known."""

    __slots__ = (
        "_requested_model",
        "_started",
        "active_requests",
        "at",
        "batch",
        "body",
        "endpoint",
        "error",
        "failure",
        "ignored",
        "key",
        "replay_of",
        "request_id",
        "stream",
    )

    def __init__(self, key: ApiKeySnapshot, request_id: str, endpoint: str, started: float | None = None) -> None:
        """Create a trace. `started` is the monotonic time of the request's arrival; default: now."""
        self.key = key
        self.request_id = request_id
        self.endpoint = endpoint
        self.at = time.time_ns() // 1000
        self._started = time.monotonic() if started is None else started
        self._requested_model = ""
        self.stream = False
        self.ignored: Sequence[str] = ()  # request fields that were accepted without effect
        self.active_requests: list[ActiveRequest] = []  # one for each prompt that was started
        self.error: ApiError | None = None  # reported to the client
        self.failure = ""  # failure of the answer, found by its endpoint
        self.replay_of = ""
        self.batch: tuple[int, int] | None = None  # (batch ID, line number)
        self.body: bytes | None = None  # if content is stored

    @property
    def keeps_content(self) -> bool:
        return self.key.content_retention_days > 0

    def set_request(self, request: InferenceRequest, body: bytes | None) -> None:
        """Set the request and, if the tenant stores content, its body."""
        self._requested_model, self.stream, self.ignored = request.model, request.stream, request.analysis.ignored
        if self.keeps_content and body is not None:
            self.body = body[: 4 * MAX_CONTENT_CHARACTERS + 4]  # the rest would not be stored

    def record(self, gateway_id: str, status: str, *, complete: bool) -> Record:
        """Return the request's record.

        Args:
            status: as in the access log.
            complete: whether the whole response was sent.
        """
        key, error, first = self.key, self.error, self.active_requests[0] if self.active_requests else None
        admitted = [active.execution.admitted for active in self.active_requests if active.executions]
        limit_statuses: Sequence[LimitStatus] = (error.limit_statuses if error is not None else None) or ()
        if admitted and not limit_statuses:
            limit_statuses = admitted[0].limit_statuses
        reserved = [each.reserved_nano for each in admitted if each.reserved_nano is not None]
        first_token_at = first.execution.first_token_at if first is not None and first.executions else None
        decision_record = DecisionRecord() if first is None else first.decision_record
        code = "" if error is None else error.code
        outcome = _outcome(status, code, complete=complete)
        executions = decision_record.placements
        was_rejected = outcome in ("limited", "refused") and not executions
        ended = time.monotonic()
        cache_layer, cache_source = _cache_layer(
            active.execution for active in self.active_requests if active.executions
        )
        batch_id, batch_line = self.batch or (None, None)
        return Record(
            tenant_id=key.tenant_id,
            started_at=self.at,
            request_id=self.request_id,
            project_id=key.project_id,
            key_id=key.key_id,
            gateway_id=gateway_id,
            endpoint=self.endpoint,
            requested_model=_clean(self._requested_model, MAX_MODEL_NAME_LENGTH),
            served_model="" if first is None or was_rejected else _clean(first.model, MAX_MODEL_NAME_LENGTH),
            stream=self.stream,
            status=status,
            code=code,
            outcome=outcome,
            limited_by=None if error is None else error.bound,
            limits=[_limit(item) for item in limit_statuses[:MAX_LISTED]],
            budget_periods=admitted[0].budget_period_ids if admitted else (),
            route=decision_record.select(_ROUTE),
            placements=executions[:MAX_LISTED],
            prompts=max(1, len(self.active_requests)),
            prompt_tokens=_prompt_tokens(self.active_requests),
            max_tokens=admitted[0].max_tokens if admitted else None,
            reserved_nano=sum(reserved) if reserved else None,
            price_version=admitted[0].price_version if admitted else None,
            total_ms=round((ended - self._started) * 1000),
            ttft_ms=None if first_token_at is None else round((first_token_at - self._started) * 1000),
            dry_run_rejections=sum(1 for item in limit_statuses if item.wait_ms and item.check.group != ENFORCED),
            replay_of=self.replay_of,
            ignored=self.ignored if first is None else first.ignored,
            cache_layer=cache_layer,
            cache_source=cache_source,
            batch_id=batch_id,
            batch_line=batch_line,
            **success_signals(self.active_requests, self.failure)._asdict(),
        )

    def content(self) -> LoggedContent | None:
        """Return the prompt and the completions to store, or None."""
        if self.body is None:
            return None
        body = self.body.decode("utf-8", "replace")
        answers = [
            "".join(active.execution.completion_texts[index])
            for active in self.active_requests
            if active.executions
            for index in sorted(active.execution.completion_texts)
        ]
        remaining, stored = MAX_CONTENT_CHARACTERS, []
        for answer in answers:
            stored.append(_clean(answer, remaining))
            remaining -= len(stored[-1])
        truncated = len(body) > MAX_CONTENT_CHARACTERS or sum(map(len, stored)) < sum(map(len, answers))
        return LoggedContent(
            self.key.tenant_id, self.request_id, self.at, _clean(body, MAX_CONTENT_CHARACTERS), stored, truncated
        )


class WriteBuffer:
    """Encoded rows of one table, waiting to be written."""

    def __init__(self, record_type: str, statement: str, max_rows: int) -> None:
        self.record_type = record_type
        self.statement = statement
        self.max_rows = max_rows
        self.rows: deque[bytes] = deque()


class RequestLogWriter:
    """The writer of one gateway's records."""

    def __init__(self, database: TenantConnectionPool, gateway_id: str, metrics: GatewayMetrics) -> None:
        self._database = database
        self._gateway_id = gateway_id
        self._lost = metrics.records_lost
        self._records = WriteBuffer("record", _INSERT_RECORDS, MAX_PENDING_RECORDS)
        self._contents = WriteBuffer("content", _INSERT_CONTENTS, MAX_PENDING_CONTENTS)
        self._shadows = WriteBuffer("shadow", _INSERT_SHADOWS, MAX_PENDING_SHADOWS)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write the last records, within STOP_SECONDS."""
        if self._task is not None:
            await cancel_and_wait([self._task])
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.flush()
        except TimeoutError:
            log.warning("request_record_write_failed", records=len(self._records.rows))

    def end(self, trace: RequestTrace, status: str, *, complete: bool = True) -> None:
        """Buffer the record of an ended request."""
        self._put(self._records, trace.record(self._gateway_id, status, complete=complete))
        content = trace.content()
        if content is not None:
            self._put(self._contents, content)

    def add_shadow(self, comparison: ShadowRecord) -> None:
        """Buffer the comparison of a request with its shadow."""
        comparison.requested_model = _clean(comparison.requested_model, MAX_MODEL_NAME_LENGTH)
        self._put(self._shadows, comparison)

    async def flush(self) -> None:
        """Write all buffered rows."""
        await self._write(self._records)
        await self._write(self._contents)
        await self._write(self._shadows)

    def _put(self, buffer: WriteBuffer, row: Record | LoggedContent | ShadowRecord) -> None:
        if len(buffer.rows) >= buffer.max_rows:
            buffer.rows.popleft()
            self._lost.labels(buffer.record_type).inc()
        buffer.rows.append(encode_row(row))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            try:
                await self.flush()
            except Exception:
                log.exception("request_record_write_failed")

    async def _write(self, buffer: WriteBuffer) -> None:
        database = buffer.rows
        while database:
            batch = [database.popleft() for _ in range(min(INSERT_BATCH_SIZE, len(database)))]
            try:
                async with self._database.autocommit_connection() as connection:
                    await connection.execute(buffer.statement, [(b"[%s]" % b",".join(batch)).decode()])
            except asyncio.CancelledError:
                database.extendleft(reversed(batch))
                raise
            except (ApiError, psycopg.Error) as exc:
                if isinstance(exc, ApiError) and exc.retry_after is not None:  # the database is unavailable
                    database.extendleft(reversed(batch))
                    return
                self._lost.labels(buffer.record_type).inc(len(batch))  # a retry would fail in the same way
                log.warning("request_records_rejected", records=len(batch), error=str(exc))


def _outcome(status: str, code: str, *, complete: bool) -> str:
    if code in LIMITED:
        return "limited"
    if status == "nothing" or code == "cancelled" or (not code and not complete):
        return "cancelled"
    if status.startswith("stream_") or status[0] == "5":
        return "failed"
    return "completed" if status[0] == "2" else "refused"


def _prompt_tokens(parts: Sequence[ActiveRequest]) -> int | None:
    """Return the tokens of all prompts; None if the request was rejected before it was routed."""
    return sum(active.prompt.expected_tokens for active in parts) if parts else None


def _cache_layer(executions: Iterable[Execution]) -> tuple[str, str]:
    """Return the cache layer of a request and the request that its answer is from. Of several prompts, the layer with
    the most computation counts."""
    first = min(executions, key=lambda execution: _LAYERS.index(execution.cache_layer), default=None)
    if first is None or not first.cache_layer:
        return "", ""
    answer = first.answer
    return first.cache_layer, answer.source if answer is not None and answer.layer else ""


def _limit(status: LimitStatus) -> dict[str, Any]:
    check = status.check
    fields = {
        "set": check.set.id,
        "scope": check.set.scope,
        "model": check.set.model,
        "name": check.name,
        "limit": check.limit,
        "left": status.remaining,
        "cost": check.cost,
        "reset_ms": status.reset_ms,
    }
    if check.group != ENFORCED:
        fields["dry"] = True
    if status.wait_ms:
        fields["refused"] = True
    return fields


def _clean(text: str, max_characters: int) -> str:
    """Return the start of the text, without characters that the database rejects."""
    return text[:max_characters].replace("\0", "")
