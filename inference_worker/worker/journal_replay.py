"""Replay of a journal: what its process could not send is sent or failed, and what is settled is removed.

What a failover of PostgreSQL may have lost is sent again. The settler announces PostgreSQL's timeline in Valkey
(`TIMELINE_KEY`), and the journal stores the one that has its settled events. So a worker that was not running at the
failover finds the difference too. While the key is missing, PostgreSQL's state is unknown.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, get_args

import redis
import structlog
from msgspec import Raw
from msgspec.structs import replace

from inference_worker.contract import claims
from inference_worker.contract.journal import Journal, execution_key, parse_stream_id
from inference_worker.contract.messages import (
    TIMELINE_KEY,
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

RESEND_BATCH = 256  # events that are sent again in one round trip


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
        # After a failover of PostgreSQL: its new timeline, and the events that are not sent again yet.
        self._new_timeline: str | None = None
        self._lost: deque[ExecutionUsage] = deque()

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
        """Mark settled events in the journal, and delete old ones.

        After a restart of the broker, resend them instead. After a failover of PostgreSQL, collect those that it may
        have lost, for `send_lost`.
        """
        timeline: Any = self._broker.get(TIMELINE_KEY)
        settled = self._settled_watermark()
        # NOTE: the order matters: a watermark read after a restart would drop events that the broker has lost.
        if self._detect_restart():
            self.must_resend = True
            self.resend()
        elif timeline is None or not self._find_lost(timeline.decode()):
            self.journal.settled_below(settled)

    def send_lost(self) -> bool:
        """Send a batch of the events that a failover of PostgreSQL may have lost. Return whether there are more.

        The settler counts each execution once. If the process is killed before the last batch, the next one sends all
        of them again.
        """
        if self._new_timeline is None:
            return False
        batch = list(islice(self._lost, RESEND_BATCH))
        pipe = self._broker.pipeline(transaction=False)
        for usage in batch:
            pipe.xadd(USAGE_STREAM, {"e": usage.encoded})
        stream_ids: list[Any] = pipe.execute()
        for usage, stream_id in zip(batch, stream_ids, strict=True):
            self.journal.confirm(execution_key(usage), stream_id.decode())
            self._lost.popleft()
        if self._lost:
            return True
        self.journal.note_timeline(self._new_timeline)
        self._new_timeline = None
        return False

    def _find_lost(self, timeline: str) -> bool:
        """Collect the events that PostgreSQL may have lost, if this timeline is new. Return whether some are not sent
        again yet."""
        known = self.journal.timeline
        if timeline == known or (known is None and not self.journal.has_retained_events):
            self._new_timeline = None
            self.journal.note_timeline(timeline)
            return False
        if timeline != self._new_timeline:
            self.journal.reopen_settled()
            self._lost = deque(usage for usage, stream_id in self.journal.open_events() if stream_id is not None)
            self._new_timeline = timeline
            log.warning("usage_sent_again", timeline=timeline, before=known, executions=len(self._lost))
        return True

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
