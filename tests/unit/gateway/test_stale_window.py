"""The stale window: how long cached keys stay valid while PostgreSQL does not answer."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from psycopg_pool import PoolTimeout

from millrace.gateway.auth.stale_window import ATTEMPT_SECONDS, StaleWindow, answer_within

TENANT, OTHER = 1, 2


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def failing_window(seconds: float = 60.0) -> tuple[StaleWindow, Clock]:
    clock = Clock()
    window = StaleWindow(seconds, clock)
    window.note_poll(clock.now)
    window.note_error(PoolTimeout())
    return window, clock


def test_it_covers_tenants_only_while_queries_fail_and_only_for_its_time() -> None:
    window, clock = failing_window()
    assert window.covers(TENANT)
    clock.now += 59
    assert window.is_open and window.covers(TENANT)
    clock.now += 1
    assert not window.is_open and not window.covers(TENANT)
    window.note_poll(clock.now)
    assert window.is_open and not window.covers(TENANT)  # the database answers


def test_it_is_closed_by_default_and_before_the_first_poll() -> None:
    window, _ = failing_window(0.0)
    assert not window.covers(TENANT)
    window = StaleWindow(60.0, Clock())
    window.note_error(PoolTimeout())
    assert not window.covers(TENANT)


def test_an_error_that_the_database_reports_is_an_answer() -> None:
    window, _ = failing_window()
    window.note_error(psycopg.errors.InsufficientPrivilege())
    assert not window.covers(TENANT)
    window.note_error(psycopg.errors.AdminShutdown())
    assert window.covers(TENANT)
    window.note_answer()
    assert not window.covers(TENANT)


def test_one_caller_per_second_has_to_query() -> None:
    window, clock = failing_window()
    assert [window.replaces_query(TENANT) for _ in range(3)] == [True] * 3
    clock.now += ATTEMPT_SECONDS
    assert [window.replaces_query(TENANT) for _ in range(3)] == [False, True, True]


def test_a_reported_change_excludes_its_tenant_until_the_next_poll() -> None:
    window, clock = failing_window()
    clock.now += 1
    window.note_change(TENANT)
    assert (window.covers(TENANT), window.may_cover(TENANT), window.covers(OTHER)) == (False, False, True)
    window.note_poll(clock.now - 0.1)  # it began before the message
    window.note_error(PoolTimeout())
    assert not window.covers(TENANT)
    window.note_poll(clock.now + 0.1)
    window.note_error(PoolTimeout())
    assert window.covers(TENANT)


async def test_a_query_that_ignores_its_cancellation_does_not_delay_the_answer() -> None:
    over = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await over.wait()

    with pytest.raises(TimeoutError):
        await answer_within(0.01, hang())
    over.set()
    assert await answer_within(60, asyncio.sleep(0, "row")) == "row"
