"""The reconciler and the workers' journals: it reports exactly the events that were never sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from billing.metering.ingest import UsageMessage, settle
from billing.metering.reconciler import reconcile
from inference_worker.contract.host import host_name
from inference_worker.contract.journal import Journal, execution_key
from inference_worker.contract.messages import ExecutionUsage, encode
from tests.support.billing.usage_events import make_event

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]
LONG_AGO = 4 * 3_600_000_000  # microseconds; longer than any request can run


@pytest.fixture
def journalled(tmp_path: Path) -> Callable[..., None]:
    """Return a function that writes events to a journal as a worker does."""

    def write(worker: str, *events: ExecutionUsage) -> None:
        journal = Journal(tmp_path / worker)
        journal.append(events)
        journal.close()

    return write


def old(number: int, **changes: Any) -> ExecutionUsage:
    at = time.time_ns() // 1000 - LONG_AGO + number
    return make_event(request_id=f"req_{number}", admitted_at=at, tenant_id=1 + number % 2, **changes)


def settle_events(*events: ExecutionUsage) -> None:
    settle([UsageMessage(f"{number}-0", encode(event)) for number, event in enumerate(events)])


def test_unsent_events_of_a_lost_worker_are_reported(tmp_path: Path, journalled: Callable[..., None]) -> None:
    events = [old(number) for number in range(4)]
    journalled("gone", *events[:3])
    journalled("alive", events[3])
    settle_events(events[3])
    report = reconcile(tmp_path)
    tokens = events[0].usage.prompt + events[0].usage.output
    assert report.differences == [
        {"journal": "gone", "host": host_name(), "tenant": 1, "requests": 2, "tokens": 2 * tokens},
        {"journal": "gone", "host": host_name(), "tenant": 2, "requests": 1, "tokens": tokens},
    ]
    assert not report.is_clean
    settle_events(*events)  # the worker has returned
    assert reconcile(tmp_path).is_clean


def test_events_that_can_still_be_sent_are_not_reported(tmp_path: Path, journalled: Callable[..., None]) -> None:
    journalled("a", make_event(request_id="req_new", admitted_at=time.time_ns() // 1000))
    assert reconcile(tmp_path).is_clean


def test_an_attempt_replaced_by_another_is_not_reported(tmp_path: Path, journalled: Callable[..., None]) -> None:
    first = old(1, attempt=1)
    journalled("a", first)
    settle_events(msgspec.structs.replace(first, attempt=2))
    assert reconcile(tmp_path).is_clean


def test_quarantined_events_are_reported_only_there(tmp_path: Path, journalled: Callable[..., None]) -> None:
    refused = old(1, block_size=-1)
    journalled("a", refused)
    settle_events(refused)
    report = reconcile(tmp_path)
    assert (report.differences, report.quarantined) == ([], 1)


def test_events_that_must_not_be_settled_are_not_reported(tmp_path: Path) -> None:
    event = old(1)
    for _ in range(2):  # recorded by a running worker and by a restarted one
        journal = Journal(tmp_path / "a")
        journal.append([event])
        journal.drop(execution_key(event))
        journal.close()
        assert reconcile(tmp_path).is_clean
    journal = Journal(tmp_path / "a")
    assert journal.open_events() == []
    journal.close()


@pytest.mark.parametrize("payload", [b"\xc1", encode(make_event(admitted_at=2**62))])
def test_a_journal_that_cannot_be_read_hides_no_other(
    tmp_path: Path, journalled: Callable[..., None], monkeypatch: pytest.MonkeyPatch, payload: bytes
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ExecutionUsage, "encoded", payload)
        journalled("broken", old(1))
    journalled("whole", old(2))
    assert [difference["journal"] for difference in reconcile(tmp_path).differences] == ["whole"]


def test_events_of_archived_months_are_not_reported(tmp_path: Path, journalled: Callable[..., None]) -> None:
    journalled("a", make_event(request_id="req_1", admitted_at=1_000_000_000_000_000))  # of 2001
    assert reconcile(tmp_path).is_clean


def test_a_machine_without_journals(tmp_path: Path) -> None:
    assert reconcile(tmp_path / "none").is_clean


def test_executions_that_the_operator_pays_have_no_usage_event(tmp_path: Path, journalled: Callable[..., None]) -> None:
    event = old(1)
    context = msgspec.structs.replace(event.billing_context, is_operator_paid=True)
    shadow = msgspec.structs.replace(event, billing_context=context)
    journalled("a", shadow)
    assert reconcile(tmp_path).is_clean
