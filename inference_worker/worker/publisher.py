"""Delivery of engine outputs to gateways, resuming readers and the settler.

One thread runs in rounds. A round takes everything that was delivered since the previous one, so a slow broker leads to
larger rounds instead of a queue. In a round, ends are written to the journal and synced. Then one round trip writes
every gateway's batch and every request's event log. Each end is sent by the script that also writes its usage event
(claims.FINISH), with the execution's other events of the round. So the gateway receives them in one message.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import redis
import structlog
from msgspec import Raw
from msgspec.structs import replace

from inference_worker.contract import claims
from inference_worker.contract.command_connection import Command
from inference_worker.contract.journal import Journal, execution_key
from inference_worker.contract.messages import (
    GATEWAY_STREAM_LENGTH,
    USAGE_STREAM,
    End,
    ExecutionUsage,
    Failed,
    Finished,
    Released,
    Tokens,
    Vectors,
    claim_key,
    encode,
    event_log_key,
    gateway_stream,
)
from inference_worker.contract.request import (
    CacheReport,
    MissReason,
    RequestError,
    RequestOutput,
    TokenCounts,
    TokenLogprobs,
)
from inference_worker.contract.upstreams import UsageSource
from inference_worker.worker.engine_client import ActiveJob, Delivery, Outcome, Requeued, is_last
from inference_worker.worker.journal_replay import JournalReplay, log_end
from inference_worker.worker.shared_pins import PIN, pin_args, pin_keys
from inference_worker.worker.thread_commands import ThreadCommands

log = structlog.get_logger(__name__)

RETRY_SECONDS = 0.2
CLOSING_SECONDS = 5.0  # for the last writes
LAST_WRITE_SECONDS = 1.0  # for a write that has begun by then
TRIM_SECONDS = 5.0
RESERVE_SECONDS = 0.2  # between attempts to reserve journal space, which fail while the disk is full
VECTORS_SECONDS = 60  # short, because vectors are large and a caller can send the request again
# Miss reasons that become "other_worker" if another replica has the prefix.
_ELSEWHERE: tuple[MissReason, ...] = ("first_use", "expired_or_evicted")


class _PublishingGivenUp(Exception):
    """The broker or the journal was unavailable until the end of the process."""


class _LoggedEvent(NamedTuple):
    """An event of an execution. It is encoded once, for its gateway's batch and for its log."""

    encoded: bytes
    is_first: bool  # whether it is the log's first event
    is_streamed: bool = True  # whether the gateway receives it; otherwise it is only in the log


class _EndedExecution(NamedTuple):
    """A completed or cancelled execution."""

    live: ActiveJob
    events: list[_LoggedEvent]  # events of the round, before its end
    end: End
    usage: ExecutionUsage


@dataclass
class _OutputBatch:
    """The writes of one round."""

    by_gateway: defaultdict[str, list[Raw]] = field(default_factory=lambda: defaultdict(list))
    logs: list[tuple[str, _LoggedEvent]] = field(default_factory=list)  # with the keys of the logs
    pins: list[tuple[ActiveJob, Mapping[bytes, int]]] = field(default_factory=list)
    ends: list[_EndedExecution] = field(default_factory=list)
    failures: list[tuple[ActiveJob, Failed, ExecutionUsage]] = field(default_factory=list)
    requeued: list[ActiveJob] = field(default_factory=list)


class Publisher:
    """The thread that publishes outputs and owns the journal. `deliver` is thread-safe and returns immediately."""

    def __init__(
        self,
        broker: redis.Redis,
        journal: Journal,
        *,
        log_seconds: int,
        retention_seconds: int,
        on_broken: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._commands = ThreadCommands(broker)
        self._journal = journal
        self._log_seconds = log_seconds
        self._retention_seconds = retention_seconds
        self._on_broken = on_broken
        self._finish_script = broker.register_script(claims.FINISH)
        self._abandon_script = broker.register_script(claims.ABANDON)
        self._fail_script = broker.register_script(claims.FAIL)
        self._inbox: queue.SimpleQueue[Sequence[Delivery] | None] = queue.SimpleQueue()
        self._scripts_loaded = False
        self._trim_at = 0.0
        self._reserve_at = 0.0
        self._give_up_at = math.inf  # when failed writes are not repeated any more, on the monotonic clock
        self._replay = JournalReplay(broker, journal, retention_seconds)
        # Events that were not settled at the last look, oldest first; without those that the operator pays, which have
        # no usage event.
        self.unsettled: Sequence[ExecutionUsage] = ()
        self._replay_journal()
        self._look_at_journal()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self._inbox.put(deliveries)

    def close(self) -> None:
        """Publish what was delivered, then stop.

        Writes that fail for CLOSING_SECONDS are given up. The worker's next process sends the ends in the journal.
        """
        self._give_up_at = time.monotonic() + CLOSING_SECONDS
        self._inbox.put(None)
        self._thread.join(CLOSING_SECONDS + LAST_WRITE_SECONDS)
        if self._thread.is_alive():
            log.error("publisher_left")
            return
        self._commands.close()
        self._journal.close()

    def _run(self) -> None:
        try:
            self._publish()
        except _PublishingGivenUp as exc:
            log.error("outputs_left", error=str(exc))
        except Exception:
            # The process would continue to claim work without sending any outputs.
            log.exception("publisher_broken")
            self._on_broken()

    def _publish(self) -> None:
        closing = False
        while not closing:
            items = self._gather()
            closing = None in items
            round_ = self._group_outputs([item for item in items if item is not None])
            self._until_done(lambda: self._journal_ends(round_))  # noqa: B023 - called before round_ changes
            self._until_done(lambda: self._write(round_))  # noqa: B023
            self._run_maintenance()

    def _gather(self) -> list[Sequence[Delivery] | None]:
        items: list[Sequence[Delivery] | None] = []
        try:
            items.append(self._inbox.get(timeout=TRIM_SECONDS))
            while True:
                items.append(self._inbox.get_nowait())
        except queue.Empty:
            return items

    def _group_outputs(self, items: Sequence[Sequence[Delivery]]) -> _OutputBatch:
        """Merge each sequence's outputs of the round, and number each request's events."""
        round_ = _OutputBatch()
        merged: dict[str, tuple[ActiveJob, list[Outcome]]] = {}
        for item in items:
            for live, outcome in item:
                merged.setdefault(live.engine_id, (live, []))[1].append(outcome)
        for live, outcomes in merged.values():
            outputs = [outcome for outcome in outcomes if isinstance(outcome, RequestOutput)]
            events = self._add_outputs(round_, live, outputs)
            if is_last(outcomes[-1]):
                events = self._add_end(round_, live, outcomes[-1], events)
            key = event_log_key(live.job.billing_context.request_id, live.attempt)
            round_.logs += [(key, event) for event in events]
            if streamed := [Raw(event.encoded) for event in events if event.is_streamed]:
                round_.by_gateway[live.job.gateway_id] += streamed
        return round_

    def _add_outputs(self, round_: _OutputBatch, live: ActiveJob, outputs: list[RequestOutput]) -> list[_LoggedEvent]:
        """Return the events of an execution's outputs."""
        events: list[_LoggedEvent] = []
        request_id, attempt = live.job.billing_context.request_id, live.attempt
        live.reasoning_tokens += sum(output.reasoning_tokens for output in outputs)
        for index in dict.fromkeys(output.index for output in outputs):
            answer = [output for output in outputs if output.index == index]
            if any(_has_content(output) for output in answer):
                events.append(_log(live, _tokens(live, answer)))
            last = answer[-1]
            if last.pins and not live.pins_reported:
                live.pins_reported = True
                round_.pins.append((live, last.pins))
            if last.finish_reason is not None and not is_last(last):
                finished = Finished(request_id, attempt, live.next_seq, index, last.finish_reason, last.stop_reason)
                events.append(_log(live, finished))
            if last.vectors:
                events.append(_log(live, Vectors(request_id, attempt, live.next_seq, last.vectors)))
        return events

    def _add_end(
        self, round_: _OutputBatch, live: ActiveJob, last: Outcome, events: list[_LoggedEvent]
    ) -> list[_LoggedEvent]:
        """Add the end of an execution. Return those of its events that are not sent with the end."""
        request_id, attempt = live.job.billing_context.request_id, live.attempt
        if isinstance(last, Requeued):
            round_.requeued.append(live)
        elif isinstance(last, RequestError):
            failed = Failed(request_id, attempt, live.next_seq, last.code, last.message, last.param, last.retry_after)
            source, reported = last.usage_source, last.reported_usage
            used = last.usage or TokenCounts()
            spent = self._usage(live, "failed", last.code, used, source=source, reported=reported)
            round_.failures.append((live, failed, spent))
        elif last.finish_reason is not None:
            usage = last.usage or TokenCounts()
            if live.job.hides_output:
                usage = replace(usage, output=0)
            outcome = "cancelled" if last.finish_reason == "cancelled" else "completed"
            drafts = last.accepted_drafts, last.rejected_drafts
            end = End(request_id, attempt, live.next_seq, last.finish_reason, last.stop_reason, usage, *drafts)
            source, reported = last.usage_source, last.reported_usage
            execution_usage = self._usage(
                live, outcome, last.finish_reason, usage, last.cache, drafts, source=source, reported=reported
            )
            round_.ends.append(_EndedExecution(live, events, end, execution_usage))
            return []
        return events

    def _usage(
        self,
        live: ActiveJob,
        outcome: str,
        reason: str,
        usage: TokenCounts,
        cache: CacheReport | None = None,
        drafts: tuple[int, int] = (0, 0),
        *,
        source: UsageSource,
        reported: TokenCounts | None,
    ) -> ExecutionUsage:
        now = time.monotonic()
        cache = cache or CacheReport()
        return ExecutionUsage(
            billing_context=live.job.billing_context,
            attempt=live.attempt,
            outcome=outcome,
            finish_reason=reason,
            usage=usage,
            replica_id=live.replica_id,
            block_size=live.block_size,
            queue_us=_microseconds(live.claimed_at, live.scheduled_at or now),
            ttft_us=_microseconds(live.claimed_at, live.first_token_at or now),
            duration_us=_microseconds(live.claimed_at, now),
            miss_reason=self._miss_reason(live, cache.miss),
            changed_at=cache.changed_at,
            unpinned_tokens=cache.unpinned_tokens,
            reasoning_tokens=min(live.reasoning_tokens, usage.output),
            usage_source=source,
            credential=live.job.credential,
            is_tenant_credential=live.job.is_tenant_credential,
            accepted_drafts=drafts[0],
            rejected_drafts=drafts[1],
            host_tokens=cache.host_tokens,
            reported_usage=reported,
        )

    def _miss_reason(self, live: ActiveJob, miss: MissReason | None) -> str:
        """Return why the prefix cache did not have the whole prompt. "other_worker": another replica has it."""
        replicas_with_prefix = live.job.replicas_with_prefix
        elsewhere = (replicas_with_prefix and live.replica_id not in replicas_with_prefix) or (
            miss == "first_use" and live.paid.pins
        )
        return "other_worker" if elsewhere and miss in _ELSEWHERE else miss or ""

    def _journal_ends(self, round_: _OutputBatch) -> None:
        if round_.ends:
            self._journal.append(ended.usage for ended in round_.ends)

    def _write(self, round_: _OutputBatch) -> None:
        """Write the round to the broker. After a lost connection it is written again: clients skip events by `seq`, and
        the scripts skip ended executions."""
        commands: list[Command] = []
        for gateway_id, events in round_.by_gateway.items():
            commands.append(_add_batch(gateway_id, events))
        for key, event in round_.logs:
            commands.append(("RPUSH", key, event.encoded))
            if event.is_first:
                commands.append(("EXPIRE", key, self._log_seconds))
        for live, pins in round_.pins:  # after the first tokens, before the end that bills them
            commands.append(("EVAL", PIN, 2, *pin_keys(live), *pin_args(live, pins)))
        for ended in round_.ends:
            keys = self._finish_keys(ended.live)
            arguments = self._finish_args(ended.end, ended.usage, ended.live, ended.events)
            commands.append(("EVALSHA", self._finish_script.sha, len(keys), *keys, *arguments))
        for live, _, usage in round_.failures:
            billing_context = live.job.billing_context
            keys = [claim_key(billing_context.request_id, billing_context.execution), USAGE_STREAM]
            commands.append(("EVALSHA", self._fail_script.sha, len(keys), *keys, live.attempt, encode(usage)))
        self._load_scripts()
        results = self._execute(commands)
        ends_at = len(results) - len(round_.ends) - len(round_.failures)
        self._confirm(round_, results[ends_at:])

    def _execute(self, commands: Sequence[Command]) -> list[Any]:
        """Execute the commands, and return their replies.

        Raises:
            RedisError: one of them has failed.
        """
        replies = self._commands.exchange(commands)
        for reply in replies:
            if isinstance(reply, redis.RedisError):
                raise reply
        return replies

    def _load_scripts(self) -> None:
        """Load the scripts at first, and after an error, since Valkey may have restarted."""
        if not self._scripts_loaded:
            self._broker.script_load(claims.FINISH)
            self._broker.script_load(claims.FAIL)
            self._scripts_loaded = True

    def _confirm(self, round_: _OutputBatch, results: Sequence[Any]) -> None:
        for ended, stream_id in zip(round_.ends, results, strict=False):
            usage = ended.usage
            if stream_id is None:
                log.warning("execution_superseded", **usage.billing_context.log_fields(), attempt=usage.attempt)
                self._journal.drop(execution_key(usage))
            else:
                log_end(usage)
                self._journal.confirm(execution_key(usage), stream_id.decode())
        failures = zip(round_.failures, results[len(round_.ends) :], strict=True)
        failed = []
        for (live, event, usage), state in failures:
            if state == 1:
                log_end(usage)
                failed.append((live, event))
        if failed:
            self._send_failures(failed)
        for live in round_.requeued:
            self._requeue(live)

    def _requeue(self, live: ActiveJob) -> None:
        billing_context = live.job.billing_context
        keys = [claim_key(billing_context.request_id, billing_context.execution)]
        attempt = self._abandon_script(keys=keys, args=[live.attempt, live.replica_id])
        if attempt is not None:
            released = encode(Released(billing_context.request_id, int(attempt)))
            self._execute([_add_batch(live.job.gateway_id, [Raw(released)])])

    def _send_failures(self, failed: Sequence[tuple[ActiveJob, Failed]]) -> None:
        commands: list[Command] = []
        for live, event in failed:
            key, encoded = event_log_key(event.request_id, event.attempt), encode(event)
            commands += [("RPUSH", key, encoded), ("EXPIRE", key, self._retention_seconds)]
            commands.append(_add_batch(live.job.gateway_id, [Raw(encoded)]))
        self._execute(commands)

    def _finish_keys(self, live: ActiveJob) -> list[str]:
        billing_context = live.job.billing_context
        return [
            claim_key(billing_context.request_id, billing_context.execution),
            USAGE_STREAM,
            gateway_stream(live.job.gateway_id),
            event_log_key(billing_context.request_id, live.attempt),
        ]

    def _finish_args(
        self, end: End, usage: ExecutionUsage, live: ActiveJob, events: Sequence[_LoggedEvent]
    ) -> list[Any]:
        seconds = min(VECTORS_SECONDS, self._retention_seconds) if live.job.input_lengths else self._retention_seconds
        encoded = encode(end)
        streamed = [Raw(event.encoded) for event in events if event.is_streamed]
        logged = [event.encoded for event in events]
        return [usage.attempt, usage.encoded, encode([*streamed, Raw(encoded)]), seconds, *logged, encoded]

    def _until_done(self, write: Callable[[], None]) -> None:
        while True:
            try:
                return write()
            except (redis.RedisError, OSError) as exc:
                log.warning("broker_or_journal_unavailable", error=str(exc))
                self._replay.must_resend, self._scripts_loaded = True, False
                if time.monotonic() >= self._give_up_at:
                    raise _PublishingGivenUp(str(exc)) from exc
                time.sleep(RETRY_SECONDS)

    def _replay_journal(self) -> None:
        """Replay the journal of an earlier process of this worker.

        Ends that the broker had are sent again if it lost them. The others were never sent, so their executions fail.
        """
        self._until_done(self._replay.fail_unsent)
        self._until_done(self._replay.resend)

    def _run_maintenance(self) -> None:
        """Reserve journal space, resend after an outage or a failover, and remove settled events from the journal."""
        # Under load, two segments last less than TRIM_SECONDS. Without space the worker claims nothing.
        if not self._journal.is_reserved and time.monotonic() >= self._reserve_at:
            self._reserve_at = time.monotonic() + RESERVE_SECONDS
            self._journal.reserve()
        try:
            self._replay.resend()
            if time.monotonic() >= self._trim_at:
                self._trim_at = time.monotonic() + TRIM_SECONDS
                self._replay.remove_settled()
                self._look_at_journal()
            while self._replay.send_lost() and self._inbox.empty() and self._give_up_at == math.inf:
                pass  # outputs are sent between two batches
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
        except OSError as exc:
            log.warning("journal_unavailable", error=str(exc))

    def _look_at_journal(self) -> None:
        events = (event for event, _ in self._journal.open_events())
        self.unsettled = [event for event in events if not event.billing_context.is_operator_paid]


def _add_batch(gateway_id: str, events: Sequence[Raw]) -> Command:
    """Return the command that sends events to a gateway, if its stream exists."""
    limit = "NOMKSTREAM", "MAXLEN", "~", GATEWAY_STREAM_LENGTH
    return "XADD", gateway_stream(gateway_id), *limit, "*", "e", encode(events)


def _log(live: ActiveJob, event: Tokens | Vectors | Finished) -> _LoggedEvent:
    """Encode the execution's next event."""
    live.next_seq += 1
    return _LoggedEvent(encode(event), is_first=event.seq == 0, is_streamed=not isinstance(event, Vectors))


def _tokens(live: ActiveJob, outputs: list[RequestOutput]) -> Tokens:
    """Return one sequence's outputs of a round as one event."""
    prompt = next((output.prompt_usage for output in outputs if output.prompt_usage is not None), None)
    return Tokens(
        live.job.billing_context.request_id,
        live.attempt,
        live.next_seq,
        [token_id for output in outputs for token_id in output.token_ids],
        "".join(output.text for output in outputs),
        outputs[0].index,
        None
        if live.job.params.logprobs is None
        else [
            logprob
            for output in outputs
            for logprob in _text_logprobs(output, include_stop=live.job.params.include_stop_str_in_output)
        ],
        prompt if live.next_seq == 0 else None,
        next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None),
        "".join(output.reasoning for output in outputs),
        sum(output.reasoning_tokens for output in outputs),
        [call for output in outputs for call in output.calls],
        "".join(output.signature for output in outputs),
    )


def _has_content(output: RequestOutput) -> bool:
    """Return whether the output has something that clients receive before the end."""
    is_text = output.token_ids or output.text or output.reasoning
    return bool(is_text or output.calls or output.signature or output.reasoning_tokens)


def _text_logprobs(output: RequestOutput, *, include_stop: bool) -> list[TokenLogprobs]:
    """Return the log-probabilities of the tokens in the text.

    A token that ended the output is part of the text only with `include_stop`.
    """
    ended_by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
    return output.logprobs[:-1] if ended_by_token and not include_stop else output.logprobs


def _microseconds(start: float, end: float) -> int:
    return max(0, round((end - start) * 1e6))
