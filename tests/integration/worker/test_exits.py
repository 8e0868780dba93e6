"""Reports of exited workers, as gateways read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis

from inference_worker.contract import exits
from inference_worker.contract.journal import Journal
from inference_worker.contract.messages import EXITS_KEY, REPLICAS_KEY, beat_key


def reported(broker: redis.Redis) -> list[bytes]:
    return list(broker.zrange(EXITS_KEY, 0, -1))


def test_a_supervisor_reports_the_replica_of_the_process_that_exited(broker: redis.Redis, tmp_path: Path) -> None:
    exits.take_over(broker, tmp_path, "m-0.aa")
    assert reported(broker) == []
    for name in ("m-0.aa", "m-1.bb"):
        broker.hset(REPLICAS_KEY, name, b"beat")
        broker.set(beat_key(name), "")
    exits.report_last_exit(os.environ["MILLRACE_VALKEY_URL"], tmp_path)
    assert reported(broker) == [b"m-0.aa"]
    assert broker.hkeys(REPLICAS_KEY) == [b"m-1.bb"]
    assert (broker.exists(beat_key("m-0.aa")), broker.exists(beat_key("m-1.bb"))) == (0, 1)


def test_the_next_process_reports_its_predecessor(broker: redis.Redis, tmp_path: Path) -> None:
    for name in ("m-0.aa", "m-0.bb", "m-0.bb"):
        exits.take_over(broker, tmp_path, name)
    assert reported(broker) == [b"m-0.aa"]
    exits.take_over(broker, tmp_path, "m-0.cc")
    assert reported(broker) == [b"m-0.aa", b"m-0.bb"]


def test_a_report_without_a_broker_or_a_worker_raises_no_error(
    broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits.report_last_exit(os.environ["MILLRACE_VALKEY_URL"], tmp_path / "none")
    assert reported(broker) == []
    away = redis.Redis.from_url("redis://127.0.0.1:1/0")
    exits.take_over(away, tmp_path, "m-0.aa")
    exits.take_over(away, tmp_path, "m-0.bb")
    exits.report_last_exit("redis://127.0.0.1:1/0", tmp_path)
    exits.report_last_exit(os.environ["MILLRACE_VALKEY_URL"], tmp_path)
    assert reported(broker) == [b"m-0.bb"]


def test_old_reports_are_removed(broker: redis.Redis) -> None:
    broker.zadd(EXITS_KEY, {"old": broker.time()[0] - exits.EXIT_TTL_SECONDS - 5, "new": broker.time()[0] - 5})
    exits.report_exit(broker, "m-0.aa")
    assert reported(broker) == [b"new", b"m-0.aa"]


def test_a_process_without_the_lock_does_not_report_its_owner(broker: redis.Redis, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    exits.take_over(broker, tmp_path, "m-0.aa")
    exits.report_last_exit(os.environ["MILLRACE_VALKEY_URL"], tmp_path)
    assert reported(broker) == []
    journal.close()
    exits.report_last_exit(os.environ["MILLRACE_VALKEY_URL"], tmp_path)
    assert reported(broker) == [b"m-0.aa"]
