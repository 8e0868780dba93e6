"""The publisher: from an engine's outputs to streams, event logs and usage events in Valkey."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from structlog.testing import CapturingLogger

from inference_worker.contract import claims
from inference_worker.contract import journal as journal_module
from inference_worker.contract.journal import RECORD_BYTES, Journal, execution_key
from inference_worker.contract.messages import (
    USAGE_GROUP,
    USAGE_STREAM,
    Claimed,
    End,
    Failed,
    Finished,
    InferenceJob,
    Released,
    StreamEvent,
    Tokens,
    Vectors,
    claim_key,
    decode_event,
    decode_events,
    encode,
    event_log_key,
    gateway_stream,
)
from inference_worker.contract.request import (
    CacheReport,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenCounts,
    TokenLogprobs,
    ToolCallDelta,
)
from inference_worker.worker.engine_client import ActiveJob, Delivery, Requeued
from tests.support.waiting import eventually
from tests.support.worker.jobs import make_job, make_usage
from tests.support.worker.publishing import USAGE, ObservedPublisher, last, new_publisher, usage_events

Queued = Callable[[InferenceJob], str]


@pytest.fixture
def publisher(broker: redis.Redis, tmp_path: Path) -> Iterator[ObservedPublisher]:
    broker.xadd(gateway_stream("gw-a"), {"e": encode([])})
    publisher = make_publisher(broker, tmp_path)
    yield publisher
    publisher.close()


def make_publisher(broker: redis.Redis, folder: Path) -> ObservedPublisher:
    journal = Journal(folder / "journal")
    return new_publisher(broker, journal)


def begin(broker: redis.Redis, queued: Queued, job: InferenceJob) -> ActiveJob:
    broker.eval(claims.CLAIM, 1, queued(job), 1, "r")
    return ActiveJob(job, 1, "r", 32)


def tokens(live: ActiveJob, *ids: int) -> Delivery:
    return live, RequestOutput(live.engine_id, list(ids), "".join(f"<{i}>" for i in ids))


def gateway_events(broker: redis.Redis) -> list[StreamEvent]:
    entries = broker.xrange(gateway_stream("gw-a"))
    return [event for _, fields in entries for event in decode_events(fields[b"e"])]


def log_of(broker: redis.Redis, request_id: str, attempt: int = 1) -> list[StreamEvent]:
    return [decode_event(payload) for payload in broker.lrange(event_log_key(request_id, attempt), 0, -1)]


def test_outputs_are_published_and_metered(broker: redis.Redis, queued: Queued, publisher: ObservedPublisher) -> None:
    job = make_job()
    claimed = encode([Claimed("req_1", 1, "r")])
    broker.eval(claims.CLAIM, 1, queued(job), 1, "r", "call", claimed)
    live = ActiveJob(job, 1)
    publisher.deliver([tokens(live, 7)])
    publisher.deliver([last(live, 8)])
    assert publisher.has_ended(live)

    reported = gateway_events(broker)
    assert reported[0] == Claimed("req_1", 1, "r")
    events = reported[1:]
    assert events == log_of(broker, "req_1")
    assert [event.seq for event in events if not isinstance(event, Claimed | Released)] == list(range(len(events)))
    assert "".join(event.text for event in events if isinstance(event, Tokens)) == "<7><8>"
    end = events[-1]
    assert isinstance(end, End)
    assert end.usage == USAGE
    (usage,) = usage_events(broker)
    assert (usage.usage, usage.outcome, usage.billing_context) == (USAGE, "completed", live.job.billing_context)
    assert 0 < broker.ttl(event_log_key("req_1", 1)) <= 50


def test_the_last_tokens_are_sent_with_the_end(
    broker: redis.Redis, queued: Queued, publisher: ObservedPublisher
) -> None:
    live = begin(broker, queued, make_job())
    publisher.deliver([last(live, 7, 8)])
    assert publisher.has_ended(live)
    entries: Any = broker.xrange(gateway_stream("gw-a"))
    _, (_, entry) = entries
    assert [type(event) for event in decode_events(entry[b"e"])] == [Tokens, End]
    assert [type(event) for event in log_of(broker, "req_1")] == [Tokens, End]


def test_the_usage_event_contains_the_cache_miss_reason(
    broker: redis.Redis, queued: Queued, publisher: ObservedPublisher
) -> None:
    live = begin(broker, queued, make_job())
    report = CacheReport("prefix_changed", changed_at=40, unpinned_tokens=64, host_tokens=32)
    output = RequestOutput(live.engine_id, [7], "<7>", finish_reason="stop", usage=USAGE, cache=report)
    publisher.deliver([(live, output)])
    assert publisher.has_ended(live)
    (usage,) = usage_events(broker)
    assert (usage.miss_reason, usage.changed_at, usage.unpinned_tokens) == ("prefix_changed", 40, 64)
    assert usage.host_tokens == 32


def test_the_usage_event_contains_reasoning_tokens_and_drafts_of_all_sequences(
    broker: redis.Redis, queued: Queued, publisher: ObservedPublisher
) -> None:
    live = begin(broker, queued, make_job())
    publisher.deliver([(live, RequestOutput(live.engine_id, [7], index=index, reasoning_tokens=1)) for index in (0, 1)])
    last = RequestOutput(
        live.engine_id,
        [8],
        "<8>",
        finish_reason="stop",
        usage=TokenCounts(2, output=5),
        reasoning_tokens=1,
        accepted_drafts=2,
        rejected_drafts=4,
    )
    publisher.deliver([(live, last)])
    assert publisher.has_ended(live)
    (event,) = usage_events(broker)
    assert event.reasoning_tokens == 3
    assert (event.accepted_drafts, event.rejected_drafts) == (2, 4)


@pytest.mark.parametrize(
    ("hides_output", "finish_reason", "used", "counted"),
    [
        (False, "length", TokenCounts(uncached=2, output=1), TokenCounts(uncached=2, output=1)),
        (True, "length", TokenCounts(uncached=2, output=1), TokenCounts(uncached=2)),
        (True, "stop", TokenCounts(cache_read=2, output=3), TokenCounts(cache_read=2)),
        (True, "cancelled", TokenCounts(uncached=2, output=1), TokenCounts(uncached=2)),
        (True, "cancelled", TokenCounts(), TokenCounts()),
    ],
)
def test_a_token_that_is_not_returned_is_not_billed(
    broker: redis.Redis,
    queued: Queued,
    publisher: ObservedPublisher,
    hides_output: bool,
    finish_reason: Any,
    used: TokenCounts,
    counted: TokenCounts,
) -> None:
    """A request with `max_tokens` 0 generates one token for each of its outputs."""
    live = begin(broker, queued, msgspec.structs.replace(make_job(), hides_output=hides_output))
    publisher.deliver([(live, RequestOutput(live.engine_id, [7], "7", finish_reason=finish_reason, usage=used))])
    assert publisher.has_ended(live)
    (event,) = usage_events(broker)
    (end,) = [each for each in log_of(broker, "req_1") if isinstance(each, End)]
    assert event.usage == end.usage == counted


@pytest.mark.parametrize(
    ("miss", "replicas_with_prefix", "reported"),
    [
        ("first_use", ("other",), "other_worker"),
        ("expired_or_evicted", ("another", "other"), "other_worker"),
        ("first_use", ("other", "r"), "first_use"),  # this one had it cached too
        ("first_use", (), "first_use"),
        ("too_short", ("other",), "too_short"),
        ("prefix_changed", ("other",), "prefix_changed"),
        (None, ("other",), ""),
    ],
)
def test_a_miss_that_another_replica_would_have_avoided_is_reported(
    broker: redis.Redis,
    queued: Queued,
    publisher: ObservedPublisher,
    miss: Any,
    replicas_with_prefix: tuple[str, ...],
    reported: str,
) -> None:
    live = begin(broker, queued, msgspec.structs.replace(make_job(), replicas_with_prefix=replicas_with_prefix))
    cache = CacheReport(miss)
    publisher.deliver([(live, RequestOutput(live.engine_id, [7], "7", finish_reason="stop", usage=USAGE, cache=cache))])
    assert publisher.has_ended(live)
    assert [usage.miss_reason for usage in usage_events(broker)] == [reported]


def test_accumulated_steps_become_one_event(broker: redis.Redis, queued: Queued, tmp_path: Path) -> None:
    """When the broker is slow, batches grow, so that no backlog builds up."""
    live = begin(broker, queued, make_job())
    publisher = make_publisher(broker, tmp_path)
    broker.client_pause(300)  # type: ignore[no-untyped-call]
    for token in range(20):
        publisher.deliver([tokens(live, token)])
        time.sleep(0.005)
    publisher.deliver([last(live)])
    assert publisher.has_ended(live)
    publisher.close()
    events = [event for event in log_of(broker, "req_1") if isinstance(event, Tokens)]
    assert [token for event in events for token in event.token_ids] == list(range(20))
    assert len(events) <= 3


def test_choices_have_an_index(broker: redis.Redis, queued: Queued, publisher: ObservedPublisher) -> None:
    """Each choice's tokens and end have its index. Only the request's last output contains the usage and ends it."""
    params = SamplingParams(n=2, logprobs=0, prompt_logprobs=0)
    live = begin(broker, queued, msgspec.structs.replace(make_job(), params=params))
    prompt, name = TokenCounts(uncached=2, cache_read=1), live.engine_id

    def output(index: int, token: int, **fields: Any) -> Delivery:
        logprobs = [TokenLogprobs(token, -1.0, 1)]
        return live, RequestOutput(name, [token], f"<{token}>", index=index, logprobs=logprobs, **fields)

    publisher.deliver([output(0, 5, prompt_usage=prompt, prompt_logprobs=[TokenLogprobs(2, -2.0, 1)])])
    eventually(lambda: log_of(broker, "req_1"))
    publisher.deliver(
        [
            output(1, 6, prompt_usage=prompt),
            output(0, 7, prompt_usage=prompt, finish_reason="stop", stop_reason="x"),
            output(1, 8, finish_reason="stop", usage=USAGE),  # ended by a token that is not part of its text
        ]
    )
    assert publisher.has_ended(live)
    first, second, third, finished, end = log_of(broker, "req_1")
    assert first == Tokens(
        "req_1", 1, 0, [5], "<5>", 0, [TokenLogprobs(5, -1.0, 1)], prompt, [TokenLogprobs(2, -2.0, 1)]
    )
    assert second == Tokens("req_1", 1, 1, [6, 8], "<6><8>", 1, [TokenLogprobs(6, -1.0, 1)])
    assert third == Tokens("req_1", 1, 2, [7], "<7>", 0, [TokenLogprobs(7, -1.0, 1)])
    assert finished == Finished("req_1", 1, 3, 0, "stop", "x")
    assert end == End("req_1", 1, 4, "stop", None, USAGE)
    assert len(usage_events(broker)) == 1


def test_an_error_ends_the_execution_without_a_charge(
    broker: redis.Redis, queued: Queued, publisher: ObservedPublisher
) -> None:
    live = begin(broker, queued, make_job())
    publisher.deliver([(live, RequestError("context_length_exceeded", "too long", "messages"))])
    assert publisher.has_ended(live)
    failed = Failed("req_1", 1, 0, "context_length_exceeded", "too long", "messages")
    assert gateway_events(broker) == log_of(broker, "req_1") == [failed]
    (usage,) = usage_events(broker)
    assert (usage.outcome, usage.usage) == ("failed", TokenCounts())


def test_an_upstreams_error_reports_what_it_used_and_when_to_retry(
    broker: redis.Redis, queued: Queued, publisher: ObservedPublisher
) -> None:
    live = begin(broker, queued, msgspec.structs.replace(make_job(), credential=7))
    error = RequestError("upstream_error", "cut", None, 9.0, TokenCounts(uncached=5, output=2), "estimated")
    output = RequestOutput(live.engine_id, text="Hi", calls=[ToolCallDelta(0, "f", "{}")], signature="s")
    publisher.deliver([(live, output), (live, error)])
    assert publisher.has_ended(live)
    tokens, failed = log_of(broker, "req_1")
    assert tokens == Tokens("req_1", 1, 0, [], "Hi", calls=[ToolCallDelta(0, "f", "{}")], signature="s")
    assert failed == Failed("req_1", 1, 1, "upstream_error", "cut", None, 9.0)
    (usage,) = usage_events(broker)
    assert (usage.outcome, usage.usage) == ("failed", TokenCounts(uncached=5, output=2))
    assert (usage.usage_source, usage.credential) == ("estimated", 7)


def test_a_requeued_execution_returns_to_its_gateway(
    broker: redis.Redis, queued: Queued, publisher: ObservedPublisher
) -> None:
    live = begin(broker, queued, make_job())
    publisher.deliver([(live, Requeued())])
    assert publisher.has_ended(live)
    assert gateway_events(broker) == [Released("req_1", 2)]
    assert broker.hmget(claim_key("req_1", 0), "attempt", "state") == [b"2", b"queued"]
    assert usage_events(broker) == []


def test_a_superseded_end_is_neither_published_nor_metered(
    broker: redis.Redis, queued: Queued, publisher: ObservedPublisher
) -> None:
    live = begin(broker, queued, make_job())
    broker.eval(claims.ABANDON, 1, claim_key("req_1", 0), 1, "r")
    publisher.deliver([last(live, 1)])
    assert publisher.has_ended(live)
    assert usage_events(broker) == []
    assert not any(isinstance(event, End) for event in gateway_events(broker))


def test_an_end_survives_a_broker_outage(broker: redis.Redis, queued: Queued, publisher: ObservedPublisher) -> None:
    live = begin(broker, queued, make_job())
    for _ in range(3):
        broker.client_kill_filter(_type="normal", skipme=True)
        publisher.deliver([tokens(live, 1)])
        time.sleep(0.05)
    publisher.deliver([last(live, 2)])
    assert publisher.has_ended(live)
    assert len(usage_events(broker)) == 1
    seqs = {event.seq for event in log_of(broker, "req_1") if isinstance(event, Tokens | End)}
    assert seqs == set(range(len(seqs)))


def test_a_journaled_execution_that_was_never_published_failed(
    broker: redis.Redis, queued: Queued, tmp_path: Path
) -> None:
    """It was killed between the journal and the end, so it is not billed, also after the replay."""
    job = make_job()
    begin(broker, queued, job)
    journal = Journal(tmp_path / "journal")
    journal.append([make_usage(job)])
    journal.close()
    make_publisher(broker, tmp_path).close()
    assert [usage.outcome for usage in usage_events(broker)] == ["failed"]
    assert broker.hget(claim_key("req_1", 0), "state") == b"failed"


def test_an_upstreams_tokens_are_kept_for_the_operators_cost(
    broker: redis.Redis, queued: Queued, tmp_path: Path
) -> None:
    job = make_job()
    begin(broker, queued, job)
    usage = msgspec.structs.replace(make_usage(job), usage_source="upstream", credential=7)
    journal = Journal(tmp_path / "journal")
    journal.append([usage])
    journal.close()
    make_publisher(broker, tmp_path).close()
    (failed,) = usage_events(broker)
    assert (failed.outcome, failed.finish_reason, failed.usage_source) == ("failed", "worker_lost", "upstream")
    assert (failed.usage, failed.credential, bool(failed.usage.total)) == (usage.usage, 7, True)


def test_events_that_the_broker_lost_are_sent_again(broker: redis.Redis, queued: Queued, tmp_path: Path) -> None:
    """The broker stored the end, then crashed and lost its last second."""
    job = make_job()
    usage = make_usage(job)
    begin(broker, queued, job)  # the claim is in an older state of the broker: still running
    journal = Journal(tmp_path / "journal")
    journal.append([usage])
    journal.confirm(execution_key(usage), "1-1")
    journal.close()
    make_publisher(broker, tmp_path).close()
    assert usage_events(broker) == [usage]
    make_publisher(broker, tmp_path).close()
    assert usage_events(broker) == [usage]  # once is enough


def test_the_journal_is_trimmed_by_the_settlers_acknowledgement(
    broker: redis.Redis, queued: Queued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_worker.worker.publisher.TRIM_SECONDS", 0.05)
    journal = Journal(tmp_path / "journal")
    publisher = new_publisher(broker, journal)
    live = begin(broker, queued, make_job())
    broker.xgroup_create(USAGE_STREAM, USAGE_GROUP, id="0", mkstream=True)
    publisher.deliver([last(live, 1)])
    assert publisher.has_ended(live)
    ((_, entries),) = broker.xreadgroup(USAGE_GROUP, "s", {USAGE_STREAM: ">"})
    time.sleep(0.3)
    assert len(journal.open_events()) == 1  # delivered to the settler is not settled
    eventually(lambda: [event.billing_context.request_id for event in publisher.unsettled] == ["req_1"])
    broker.xack(USAGE_STREAM, USAGE_GROUP, entries[0][0])
    eventually(lambda: not journal.open_events())
    eventually(lambda: not publisher.unsettled)
    publisher.close()


def test_usage_that_the_operator_pays_is_not_reported_as_unsettled(broker: redis.Redis, tmp_path: Path) -> None:
    job = make_job()
    context = msgspec.structs.replace(job.billing_context, is_operator_paid=True)
    usage = make_usage(msgspec.structs.replace(job, billing_context=context))
    journal = Journal(tmp_path / "journal")
    journal.append([usage])
    journal.confirm(execution_key(usage), "1-1")
    publisher = new_publisher(broker, journal)
    assert len(journal.open_events()) == 1
    assert not publisher.unsettled
    publisher.close()


def test_journal_space_is_reserved_before_the_next_trim(
    broker: redis.Redis, queued: Queued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker without space claims nothing. Short executions must not use up the space before the trim."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 2 * RECORD_BYTES)
    journal = Journal(tmp_path / "journal")
    publisher = new_publisher(broker, journal)
    publisher._trim_at = time.monotonic() + 3600
    for number in range(12):
        live = begin(broker, queued, make_job(f"req_{number}"))
        publisher.deliver([last(live, 1)])
        assert publisher.has_ended(live)
    assert len(journal.segments) > 2

    def is_reserved() -> bool:
        publisher.deliver([])  # another round
        return journal.is_reserved

    eventually(is_reserved)
    assert journal.room >= journal_module.SEGMENT_BYTES
    publisher.close()


def test_a_full_disk_delays_the_end_and_loses_nothing(
    broker: redis.Redis, queued: Queued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal")
    publisher = new_publisher(broker, journal)
    live = begin(broker, queued, make_job())

    def full(_: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fdatasync", full)
        publisher.deliver([last(live, 1)])
        assert not publisher.has_ended(live, 0.5)
        assert usage_events(broker) == []
    assert publisher.has_ended(live)
    assert len(usage_events(broker)) == 1
    publisher.close()
    again = Journal(tmp_path / "journal")
    assert len(again.open_events()) == 1
    again.close()


def test_a_broken_publisher_stops_the_process(broker: redis.Redis, tmp_path: Path) -> None:
    """Without it, no end of an execution would be published again."""
    broken = threading.Event()
    publisher = new_publisher(broker, Journal(tmp_path / "journal"), broken.set)
    publisher.deliver([("no execution", None)])  # type: ignore[list-item]
    assert broken.wait(60)


def test_vectors_are_only_in_the_log_and_expire_soon(broker: redis.Redis, queued: Queued, tmp_path: Path) -> None:
    broker.xadd(gateway_stream("gw-a"), {"e": encode([])})
    job = msgspec.structs.replace(make_job(), input_lengths=(2, 1))
    live, usage = begin(broker, queued, job), TokenCounts(uncached=3)
    publisher = new_publisher(broker, Journal(tmp_path / "journal"), retention_seconds=500)
    publisher.deliver([(live, RequestOutput(live.engine_id, finish_reason="stop", usage=usage, vectors=b"1234"))])
    assert publisher.has_ended(live)
    publisher.close()
    end = End("req_1", 1, 1, "stop", None, usage)
    assert log_of(broker, "req_1") == [Vectors("req_1", 1, 0, b"1234"), end]
    assert gateway_events(broker) == [end]
    assert 0 < broker.ttl(event_log_key("req_1", 1)) <= 60


def test_a_broker_that_is_away_does_not_delay_the_end(
    broker: redis.Redis, queued: Queued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process finds the end in the journal."""
    monkeypatch.setattr("inference_worker.worker.publisher.CLOSING_SECONDS", 0.2)
    publisher = make_publisher(broker, tmp_path)
    live = begin(broker, queued, make_job())

    def fail(_: object) -> None:
        raise redis.ConnectionError

    monkeypatch.setattr(publisher, "_write", fail)
    publisher.deliver([last(live, 1)])
    log = CapturingLogger()
    monkeypatch.setattr("inference_worker.worker.publisher.log", log)
    began = time.monotonic()
    publisher.close()
    assert time.monotonic() - began < 30
    assert log.calls[-1].args == ("outputs_left",)
    assert not usage_events(broker)
    make_publisher(broker, tmp_path).close()
    assert [usage.outcome for usage in usage_events(broker)] == ["failed"]
