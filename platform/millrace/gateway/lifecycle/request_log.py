"""Writes down what became of each request (millrace.apps.request_log): collected in memory, written once a second.

Nothing waits for it, and nothing fails with it: while the database is away the newest `MAX_PENDING_RECORDS` are kept
and the rest is counted as lost. What a killed gateway has not written is lost too, a second's worth at most: it is
telemetry, and money has ways of its own. No prompt and no answer is kept unless the tenant has switched that on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import structlog

from millrace.gateway.admission.limits import ENFORCED
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.limit_status import LimitStatus
from millrace.gateway.core.request_db import TenantConnectionPool
from tenants.keys.snapshot import ApiKeySnapshot

if TYPE_CHECKING:
    from millrace.gateway.core.types import InferenceRequest
    from millrace.gateway.dispatch.metrics import GatewayMetrics
    from millrace.gateway.lifecycle.service import ActiveRequest

log = structlog.get_logger(__name__)

FLUSH_SECONDS = 1.0
STOP_SECONDS = 2.0  # for the last of them
INSERT_BATCH_SIZE = 200  # rows in a statement
MAX_PENDING_RECORDS = 10_000  # that wait for the database
MAX_PENDING_CONTENTS = 500
MAX_MODEL_NAME_LENGTH = 128  # characters of a model's name that somebody asked for
MAX_LISTED = 24  # limits, skipped models and placements each
MAX_CONTENT_CHARACTERS = 65_536  # characters of a request, and of its answers
LIMITED = frozenset({"rate_limit_exceeded", "budget_exceeded", "quota_exceeded", "credit_balance_exhausted"})
_ROUTE = ("policy", "targets", "prompt_tokens", "skipped")


class Record(msgspec.Struct):
    """A row of request_log_requestrecord; `started_at` in microseconds since 1970."""

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
    batch_id: int | None
    batch_line: int | None


class LoggedContent(msgspec.Struct):
    """A row of request_log_requestcontent."""

    tenant_id: int
    request_id: str
    started_at: int
    body: str
    answers: list[str]
    truncated: bool


_TYPES = {
    **dict.fromkeys(("tenant_id", "started_at", "project_id", "key_id", "reserved_nano"), "bigint"),
    **dict.fromkeys(("price_version", "batch_id"), "bigint"),
    **dict.fromkeys(("prompt_tokens", "max_tokens", "total_ms", "ttft_ms", "batch_line"), "integer"),
    **dict.fromkeys(("prompts", "dry_run_rejections"), "smallint"),
    **dict.fromkeys(("stream", "truncated"), "boolean"),
    **dict.fromkeys(("limited_by", "limits", "budget_periods", "route", "placements", "answers"), "jsonb"),
}


def _insert(table: str, row: type[msgspec.Struct]) -> str:
    """Return a statement whose one parameter is a JSON array of rows. Rows that are there already stay."""
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
_encode = msgspec.json.Encoder().encode


class RequestTrace:
    """What is known of a request under way. Made as soon as its key is known; it only refers to what others made."""

    __slots__ = (
        "_asked",
        "_began",
        "at",
        "batch",
        "body",
        "calls",
        "endpoint",
        "fault",
        "key",
        "replay_of",
        "request_id",
        "stream",
    )

    def __init__(self, key: ApiKeySnapshot, request_id: str, endpoint: str, began: float | None = None) -> None:
        """`began`: the monotonic time at which the request arrived; now, if not given."""
        self.key = key
        self.request_id = request_id
        self.endpoint = endpoint
        self.at = time.time_ns() // 1000
        self._began = time.monotonic() if began is None else began
        self._asked = ""
        self.stream = False
        self.calls: list[ActiveRequest] = []  # of each prompt one, as far as they got
        self.fault: ApiError | None = None  # that its caller was told
        self.replay_of = ""
        self.batch: tuple[int, int] | None = None  # and its line
        self.body: bytes | None = None  # if it is kept

    @property
    def keeps_content(self) -> bool:
        return self.key.content_retention_days > 0

    def asked(self, request: InferenceRequest, body: bytes | None) -> None:
        """Record the request."""
        self._asked, self.stream = request.model, request.stream
        if self.keeps_content and body is not None:
            self.body = body[
                : 4 * MAX_CONTENT_CHARACTERS + 4
            ]  # more cannot be kept, and would stay in memory for as long

    def record(self, gateway_id: str, status: str, *, complete: bool) -> Record:
        """`status` as in the log; `complete`: the whole answer was sent."""
        key, fault, first = self.key, self.fault, self.calls[0] if self.calls else None
        tickets = [ticket for call in self.calls if (ticket := getattr(call, "ticket", None)) is not None]
        limit_statuses: Sequence[LimitStatus] = (fault.limit_statuses if fault is not None else None) or ()
        if tickets and not limit_statuses:
            limit_statuses = tickets[0].limit_statuses
        terms = [ticket.terms for ticket in tickets]
        reserved = [each.reserved_nano for each in terms if each.reserved_nano is not None]
        why = {} if first is None else first.why
        code = "" if fault is None else fault.code
        ended = time.monotonic()
        return Record(
            key.tenant_id,
            self.at,
            self.request_id,
            key.project_id,
            key.key_id,
            gateway_id,
            self.endpoint,
            _clean(self._asked, MAX_MODEL_NAME_LENGTH),
            _clean(_served(first), MAX_MODEL_NAME_LENGTH),
            self.stream,
            status,
            code,
            _outcome(status, code, complete=complete),
            None if fault is None else fault.bound,
            [_limit(each) for each in limit_statuses[:MAX_LISTED]],
            terms[0].budget_period_ids if terms else (),
            {name: why[name] for name in _ROUTE if name in why},
            why.get("executions", [])[:MAX_LISTED],
            max(1, len(self.calls)),
            sum(len(call.prompt.ids) for call in self.calls) if self.calls else None,
            terms[0].max_tokens if terms else None,
            sum(reserved) if reserved else None,
            terms[0].price_version if terms else None,
            round((ended - self._began) * 1000),
            None if first is None or first.first_at is None else round((first.first_at - self._began) * 1000),
            sum(1 for each in limit_statuses if each.wait_ms and each.check.group != ENFORCED),
            self.replay_of,
            *(self.batch or (None, None)),
        )

    def content(self) -> LoggedContent | None:
        """Return what is to be kept of its prompt and answer."""
        if self.body is None:
            return None
        body = self.body.decode("utf-8", "replace")
        answers = ["".join(call.said[index]) for call in self.calls for index in sorted(call.said)]
        left, kept = MAX_CONTENT_CHARACTERS, []
        for answer in answers:
            kept.append(_clean(answer, left))
            left -= len(kept[-1])
        truncated = len(body) > MAX_CONTENT_CHARACTERS or sum(map(len, kept)) < sum(map(len, answers))
        return LoggedContent(
            self.key.tenant_id, self.request_id, self.at, _clean(body, MAX_CONTENT_CHARACTERS), kept, truncated
        )


class WriteBuffer:
    """Encoded rows of one table that wait for the database."""

    def __init__(self, kind: str, statement: str, most: int) -> None:
        self.kind = kind
        self.statement = statement
        self.most = most
        self.rows: deque[bytes] = deque()


class RequestLogWriter:
    """The records of one gateway on their way to the database."""

    def __init__(self, rows: TenantConnectionPool, gateway_id: str, metrics: GatewayMetrics) -> None:
        self._rows = rows
        self._gateway_id = gateway_id
        self._lost = metrics.records_lost
        self._records = WriteBuffer("record", _INSERT_RECORDS, MAX_PENDING_RECORDS)
        self._contents = WriteBuffer("content", _INSERT_CONTENTS, MAX_PENDING_CONTENTS)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write the last of them, if that does not take long."""
        if self._task is not None:
            await cancel_and_wait([self._task])
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.flush()
        except TimeoutError:
            log.warning("request_record_write_failed", records=len(self._records.rows))

    def end(self, trace: RequestTrace, status: str, *, complete: bool = True) -> None:
        """Buffer the ended request's record until it is written."""
        self._put(self._records, trace.record(self._gateway_id, status, complete=complete))
        content = trace.content()
        if content is not None:
            self._put(self._contents, content)

    async def flush(self) -> None:
        """Write what there is."""
        await self._write(self._records)
        await self._write(self._contents)

    def _put(self, waiting: WriteBuffer, row: Record | LoggedContent) -> None:
        if len(waiting.rows) >= waiting.most:
            waiting.rows.popleft()
            self._lost.labels(waiting.kind).inc()
        waiting.rows.append(_encode(row))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            try:
                await self.flush()
            except Exception:
                log.exception("request_record_write_failed")

    async def _write(self, waiting: WriteBuffer) -> None:
        rows = waiting.rows
        while rows:
            batch = [rows.popleft() for _ in range(min(INSERT_BATCH_SIZE, len(rows)))]
            try:
                async with self._rows.of_all() as connection:
                    await connection.execute(waiting.statement, [(b"[%s]" % b",".join(batch)).decode()])
            except asyncio.CancelledError:
                rows.extendleft(reversed(batch))
                raise
            except (ApiError, psycopg.Error) as exc:
                if isinstance(exc, ApiError) and exc.retry_after is not None:  # it cannot be reached
                    rows.extendleft(reversed(batch))
                    return
                self._lost.labels(waiting.kind).inc(len(batch))  # the same would happen to them again
                log.warning("request_records_rejected", records=len(batch), error=str(exc))


def _served(call: ActiveRequest | None) -> str:
    candidate = getattr(call, "candidate", None)
    return "" if candidate is None else str(candidate.model.name)


def _outcome(status: str, code: str, *, complete: bool) -> str:
    if code in LIMITED:
        return "limited"
    if status == "nothing" or code == "cancelled" or (not code and not complete):
        return "cancelled"
    if status.startswith("stream_") or status[0] == "5":
        return "failed"
    return "completed" if status[0] == "2" else "refused"


def _limit(standing: LimitStatus) -> dict[str, Any]:
    check = standing.check
    told = {
        "set": check.set.id,
        "scope": check.set.scope,
        "model": check.set.model,
        "name": check.name,
        "limit": check.limit,
        "left": standing.remaining,
        "cost": check.cost,
        "reset_ms": standing.reset_ms,
    }
    if check.group != ENFORCED:
        told["dry"] = True
    if standing.wait_ms:
        told["refused"] = True
    return told


def _clean(text: str, most: int) -> str:
    """As much of the text as is kept, without what the database cannot hold."""
    return text[:most].replace("\0", "")
