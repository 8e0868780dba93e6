"""Replay of a journal: what its process could not send is sent or failed, and what is settled is removed."""

from __future__ import annotations

from typing import Any, get_args

import redis
import structlog
from msgspec import Raw
from msgspec.structs import replace

from inference_worker.contract import claims
from inference_worker.contract.journal import Journal, execution_key, parse_stream_id
from inference_worker.contract.messages import (
    USAGE_GROUP,
    USAGE_STREAM,
    End,
    ExecutionUsage,
    claim_key,
    encode,
    event_log_key,
    gateway_stream,
)
from inference_worker.contract.request import FinishReason, TokenCounts

log = structlog.get_logger(__name__)


class JournalReplay:
    """The replay of one journal. Methods raise redis.RedisError and OSError, and can be repeated after that."""

    def __init__(self, broker: redis.Redis, journal: Journal, retention_seconds: int) -> None:
        self.journal = journal
        self.must_resend = True  # whether the broker may have lost ends
        self._broker = broker
        self._retention_seconds = retention_seconds
        self._finish_script = broker.register_script(claims.FINISH)
        self._fail_script = broker.register_script(claims.FAIL)
        self._run_id: str | None = None  # run of the broker's process at the last check

    def fail_unsent(self) -> None:
        """Fail the executions whose ends an earlier process did not send."""
        for usage, stream_id in self.journal.open_events():
            if stream_id is not None:
                continue
            billing_context = usage.billing_context
            failed = ExecutionUsage(
                billing_context,
                usage.attempt,
                "failed",
                "worker_lost",
                TokenCounts(),
                usage.replica_id,
                usage.block_size,
            )
            if usage.usage_source != "engine":  # the operator pays for the tokens
                failed = replace(usage, outcome="failed", finish_reason="worker_lost")
            keys = [claim_key(billing_context.request_id, billing_context.execution), USAGE_STREAM]
            self._fail_script(keys=keys, args=[usage.attempt, encode(failed)])
            self.journal.drop(execution_key(usage))
            log_end(failed)

    def resend(self) -> None:
        """Resend ends after an outage of the broker, which may have lost its last second of writes."""
        if not self.must_resend:
            return
        for usage, stream_id in self.journal.open_events():
            if stream_id is None:
                continue
            billing_context = usage.billing_context
            keys = [
                claim_key(billing_context.request_id, billing_context.execution),
                USAGE_STREAM,
                gateway_stream(""),
                event_log_key(billing_context.request_id, usage.attempt),
            ]
            end = encode(self._end_of(usage))
            args: list[Any] = [usage.attempt, usage.encoded, encode([Raw(end)]), self._retention_seconds, end]
            new_id: Any = self._finish_script(keys=keys, args=args)
            if new_id is not None:
                self.journal.confirm(execution_key(usage), new_id.decode())
        self.must_resend = False

    def remove_settled(self) -> None:
        """Remove settled events from the journal. After a restart of the broker, resend them instead."""
        settled = self._settled_watermark()
        # NOTE: the order matters: a watermark read after a restart would drop events that the broker has lost.
        if self._detect_restart():
            self.must_resend = True
            self.resend()
        else:
            self.journal.settled_below(settled)

    def _end_of(self, usage: ExecutionUsage) -> End:
        billing_context = usage.billing_context
        seq: Any = self._broker.llen(event_log_key(billing_context.request_id, usage.attempt))
        reason = usage.finish_reason if usage.finish_reason in get_args(FinishReason) else "cancelled"
        return End(billing_context.request_id, usage.attempt, int(seq), reason, None, usage.usage)  # type: ignore[arg-type]

    def _detect_restart(self) -> bool:
        """Return whether the broker's process has changed since the last call. The client reconnects silently, so this
        may be the only sign of a crash that lost the last second of writes."""
        server: Any = self._broker.info("server")
        known, self._run_id = self._run_id, str(server["run_id"])
        return known is not None and known != self._run_id

    def _settled_watermark(self) -> tuple[int, int]:
        """Return the usage stream's id below which every event is in PostgreSQL: the settler's oldest unacknowledged
        id."""
        try:
            groups: Any = self._broker.xinfo_groups(USAGE_STREAM)
        except redis.ResponseError:  # no stream yet
            return (0, 0)
        for group in groups:
            if group["name"] == USAGE_GROUP.encode():
                pending: Any = self._broker.xpending(USAGE_STREAM, USAGE_GROUP)
                oldest = pending["min"]
                milliseconds, sequence = parse_stream_id((oldest or group["last-delivered-id"]).decode())
                return (milliseconds, sequence if oldest else sequence + 1)
        return (0, 0)


def log_end(usage: ExecutionUsage) -> None:
    log.info(
        "execution_finished",
        **usage.billing_context.log_fields(),
        attempt=usage.attempt,
        outcome=usage.outcome,
        finish_reason=usage.finish_reason,
        prompt_tokens=usage.usage.prompt,
        output_tokens=usage.usage.output,
        queue_us=usage.queue_us,
        ttft_us=usage.ttft_us,
        duration_us=usage.duration_us,
    )
