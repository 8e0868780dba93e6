"""What a replica writes beside its heartbeats: its metrics, and the digest of its prefix cache if it has changed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from inference_worker.contract.messages import (
    METRICS_SECONDS,
    Heartbeat,
    Machine,
    decode_heartbeat,
    encode,
    metrics_key,
    read_metrics,
)
from inference_worker.contract.metric_families import MetricsSnapshot
from inference_worker.contract.prefix_digest import (
    DIGEST_SECONDS,
    DIGEST_TTL_SECONDS,
    NO_DIGEST,
    decode_digest,
    digest_key,
    make_digest,
)
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import EngineStats
from inference_worker.worker import replica as replica_module
from inference_worker.worker.replica import LoadedEngine, LocalReplica

MACHINE = Machine("1", "cpu", 1, "float32", 64, 16, bundle="b", weights="w")
METRICS = MetricsSnapshot({"vllm:generation_tokens": {"": 8.0}}, {}, {})


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replica_module, "time", clock)
    return clock


@pytest.fixture
def blocks() -> list[bytes]:
    """Return the hashes of the cached blocks, which a test changes."""
    return [bytes([number]) * 32 for number in range(4)]


@pytest.fixture
def replica(clock: Clock, blocks: list[bytes]) -> LocalReplica:
    client: Any = SimpleNamespace(
        prefix_digest=lambda: make_digest(16, blocks), metrics=lambda: METRICS, stats=no_stats, live=list
    )
    replica = LocalReplica("m-0.aa", ModelSpec("m", "x", "auto"))
    replica.loaded = LoadedEngine(client, MACHINE, 1, None)
    return replica


def no_stats() -> EngineStats:
    zeros: Any = [0] * 15
    return EngineStats(*zeros)


def heartbeat_of(replica: LocalReplica) -> Heartbeat:
    return decode_heartbeat(encode(replica.heartbeat(1, accepts=True, draining=False, disk_low=False)))


@pytest.fixture
def digests(replica: LocalReplica, clock: Clock) -> Callable[[float], list[int]]:
    """Return a function that returns the versions of the digests that are written after a time."""

    def write(seconds: float) -> list[int]:
        clock.now += seconds
        written = [record for record in replica.new_records() if record.key == digest_key(replica.id)]
        assert {record.ttl_seconds for record in written} <= {DIGEST_TTL_SECONDS}
        return [decode_digest(record.payload).version for record in written]

    return write


def test_a_digest_has_a_version_that_increases_with_each_change(
    replica: LocalReplica, blocks: list[bytes], digests: Callable[[float], list[int]]
) -> None:
    assert heartbeat_of(replica).digest == NO_DIGEST
    assert (digests(0), heartbeat_of(replica).digest) == ([1], 1)
    assert digests(DIGEST_SECONDS) == [], "the cache has not changed"
    blocks.reverse()
    assert digests(DIGEST_SECONDS) == [], "its order does not count"
    blocks.pop()
    assert (digests(DIGEST_SECONDS), heartbeat_of(replica).digest) == ([2], 2)
    blocks.pop()
    assert digests(DIGEST_SECONDS / 2) == [], "not more often"
    assert digests(DIGEST_SECONDS / 2) == [3]


def test_an_unchanged_digest_is_written_again_before_it_expires(
    replica: LocalReplica, digests: Callable[[float], list[int]]
) -> None:
    assert digests(0) == [1]
    assert (digests(DIGEST_TTL_SECONDS / 3), heartbeat_of(replica).digest) == ([1], 1)


def test_metrics_are_written_once_a_second_and_not_in_heartbeats(replica: LocalReplica, clock: Clock) -> None:
    def written() -> list[bytes]:
        return [record.payload for record in replica.new_records() if record.key == metrics_key(replica.id)]

    (payload,) = written()
    assert read_metrics(payload) == METRICS
    assert heartbeat_of(replica).metrics is None
    clock.now += METRICS_SECONDS / 2
    assert written() == []
    clock.now += METRICS_SECONDS / 2
    assert written() == [payload]
    assert read_metrics(None) is read_metrics(b"?") is None


def test_a_replica_that_is_not_loaded_writes_nothing(replica: LocalReplica) -> None:
    replica.loaded = None
    assert replica.new_records() == []
    assert heartbeat_of(replica).digest == NO_DIGEST


class EarlierHeartbeat(msgspec.Struct, frozen=True):
    """The fields of an earlier release's heartbeat that matter here."""

    beat: int
    model: str
    ready: bool
    draining: bool
    running: int
    waiting: int
    max_num_seqs: int
    kv_blocks: int
    kv_blocks_used: int
    metrics: MetricsSnapshot | None = None


def test_gateways_and_workers_of_two_releases_read_each_others_heartbeats(
    replica: LocalReplica, digests: Callable[[float], list[int]]
) -> None:
    digests(0)
    payload = encode(replica.heartbeat(7, accepts=True, draining=False, disk_low=False))
    read = msgspec.msgpack.decode(payload, type=EarlierHeartbeat)
    assert (read.beat, read.model, read.metrics) == (7, "m", None)
    earlier = EarlierHeartbeat(7, "m", True, False, 0, 0, 8, 10, 0, METRICS)
    heartbeat = decode_heartbeat(encode(earlier))
    assert (heartbeat.digest, heartbeat.metrics) == (None, METRICS)
