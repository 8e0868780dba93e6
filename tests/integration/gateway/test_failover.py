"""A failover of PostgreSQL to a standby that lacks the last transactions: the caches and leases of a gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from millrace.gateway.admission import budget_admission
from millrace.gateway.auth import authentication, revocation
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import ApiKeySnapshotRow
from tests.support.gateway.budgets import DOLLAR, admit_requests
from tests.support.gateway.watched_keys import Watched
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("close_connection")]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer than in production for the database, which is slow on a busy machine."""
    monkeypatch.setattr(authentication, "DATABASE_SECONDS", 30.0)
    monkeypatch.setattr(authentication, "FRESH_SECONDS", 3600.0)  # cached keys are used between two polls
    monkeypatch.setattr(revocation, "POLL_TIMEOUT_SECONDS", 30.0)


def lose_key(key_id: int) -> None:
    """Remove a key's snapshot without an entry in the change feed."""
    with all_tenants_scope(BypassReason.COMMAND):
        ApiKeySnapshotRow._base_manager.filter(key_id=key_id).delete()


async def test_a_key_that_the_failover_lost_is_rejected(
    watched: Watched, new_key: Any, promote: Callable[[str], None]
) -> None:
    key, secret = await sync_to_async(new_key)()
    created_at = time.monotonic()
    await eventually_async(lambda: watched.keys._polled_at > created_at)  # the poll of the new key removes it once
    assert await watched.error_code(secret) is None
    found = await watched.keys.find(secret)
    assert found is not None
    ended: list[str] = []
    watched.live.add(found, lambda error: ended.append(error.code))
    await sync_to_async(lose_key)(key.pk)
    assert await watched.error_code(secret) is None  # it is cached, and the feed has no change
    await sync_to_async(promote)("system:00000002")

    async def is_rejected() -> bool:
        return await watched.error_code(secret) == "invalid_api_key"

    await eventually_async(is_rejected)
    await eventually_async(lambda: ended == ["invalid_api_key"])


async def test_the_position_in_the_change_feed_is_read_again(watched: Watched, promote: Callable[[str], None]) -> None:
    """Transaction numbers may have gone back, so the earlier position would miss changes."""
    await eventually_async(lambda: watched.watcher._cursor is not None)
    cursor = watched.watcher._cursor
    assert cursor is not None
    await sync_to_async(promote)("system:00000002")
    await eventually_async(lambda: watched.watcher._cursor is not cursor)
    restarted = watched.watcher._cursor
    assert restarted is not None
    assert restarted.timeline == "system:00000002"


@pytest.mark.usefixtures("table")
async def test_leases_periods_and_prices_are_read_again(gateway: Any, budget: Any, monkeypatch: Any) -> None:
    """The IDs of periods and price versions may have been assigned to others."""
    monkeypatch.setattr(budget_admission, "PRICES_SECONDS", 0.05)
    await sync_to_async(budget)(amount=100 * DOLLAR)
    local_gateway = await gateway()
    admission = local_gateway.budget_admission
    await admit_requests(local_gateway, 1)
    newest = admission.prices.newest
    admission.prices.newest = 10**9  # a version that was lost
    (chain,) = admission._chains.values()
    assert chain.lease is not None
    admission.forget()
    assert (admission._chains, chain.lease) == ({}, None)
    await local_gateway.wait_until_returned()
    await eventually_async(lambda: admission.prices.newest == newest)
    await admit_requests(local_gateway, 1)
    (again,) = admission._chains.values()
    assert again is not chain
