"""Quarantined events are settled again or dismissed by an operator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from billing.metering.quarantine import do_dismiss_quarantined, do_replay_quarantined
from billing.metering.settler import Settler
from billing.models import UsageEvent, UsageQuarantine
from tenants.actions import ActionRefused, Conflict
from tenants.models import AuditEntry
from tests.support.billing.books import rate_card
from tests.support.rows import unscoped


@pytest.fixture
def put_aside(broker: Any, table: None, send: Callable[..., None]) -> Callable[[Any], int]:
    def put_aside(sent: Any) -> int:
        send(sent)
        Settler(broker, consumer="a", stopping=threading.Event()).drain()
        return int(unscoped(UsageQuarantine).order_by("id")[-1].pk)

    return put_aside


def test_a_corrected_event_is_settled_once(put_aside: Callable[[Any], int], event: Any) -> None:
    version = rate_card("another") + 1
    pk = put_aside(event(price_version=version))
    with pytest.raises(ActionRefused):
        do_replay_quarantined(pk)
    assert rate_card() == version
    row = do_replay_quarantined(pk)
    assert row.resolved_at is not None
    assert unscoped(UsageEvent).get().price_version == version
    with pytest.raises(Conflict):
        do_replay_quarantined(pk)
    (entry,) = unscoped(AuditEntry).filter(object_type="usagequarantine")
    assert (entry.action, entry.tenant_id, entry.object_id) == ("quarantine.replayed", None, pk)


def test_an_event_settled_before_it_was_marked_resolved_is_accepted(
    put_aside: Callable[[Any], int], event: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = rate_card("another") + 1
    pk = put_aside(event(price_version=version))
    assert rate_card() == version
    with monkeypatch.context() as patched:
        patched.setattr("billing.metering.quarantine._resolve", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            do_replay_quarantined(pk)
    assert unscoped(UsageEvent).count() == 1
    do_replay_quarantined(pk)
    assert unscoped(UsageEvent).count() == 1


def test_an_event_is_dismissed_with_a_reason(put_aside: Callable[[Any], int]) -> None:
    pk = put_aside(b"\xc1")
    with pytest.raises(ActionRefused):
        do_dismiss_quarantined(pk, " ")
    do_dismiss_quarantined(pk, "a stray script")
    assert unscoped(UsageQuarantine).get().resolved_at is not None
    assert unscoped(AuditEntry).get(object_type="usagequarantine").after["why"] == "a stray script"
    with pytest.raises(Conflict):
        do_dismiss_quarantined(pk, "again")
    assert unscoped(UsageEvent).count() == 0
