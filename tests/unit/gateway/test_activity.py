"""The rest of a gateway: rare polls without requests, and one round of each before the next request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millrace.gateway.core import activity as module
from millrace.gateway.core.activity import REST_AFTER_SECONDS, Activity, Poll
from millrace.gateway.core.asyncio_utils import cancel_and_wait


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Reader:
    """A task that polls, and counts its rounds. A round ends when `may_finish` is set."""

    def __init__(self, activity: Activity | None, seconds: float = 0.001, *, is_read_by_requests: bool = True) -> None:
        self.poll = Poll(activity, is_read_by_requests=is_read_by_requests)
        self.rounds = 0
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self._seconds = seconds

    async def run(self) -> None:
        while True:
            await self.may_finish.wait()
            self.rounds += 1
            await self.poll.pause(self._seconds)


@asynccontextmanager
async def running(*readers: Reader) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(reader.run()) for reader in readers]
    try:
        await asyncio.sleep(0)
        yield
    finally:
        await cancel_and_wait(tasks)


async def rounds_until(reader: Reader, count: int) -> None:
    async with asyncio.timeout(5):
        while reader.rounds < count:
            await asyncio.sleep(0)


async def test_a_poll_has_its_own_interval_during_activity(clock: Clock) -> None:
    reader = Reader(Activity(lambda: False, clock))
    async with running(reader):
        await rounds_until(reader, 3)


async def test_polls_rest_without_requests_and_run_before_the_next(clock: Clock) -> None:
    activity = Activity(lambda: False, clock)
    clock.now += REST_AFTER_SECONDS
    first, second = Reader(activity), Reader(activity)
    async with running(first, second):
        await asyncio.sleep(0.05)  # many of their intervals
        assert (first.rounds, second.rounds) == (1, 1)
        await activity.begin_request()
        assert min(first.rounds, second.rounds) >= 2
        await rounds_until(first, 4)  # the request has ended the rest


async def test_polls_do_not_rest_while_work_is_unfinished(clock: Clock) -> None:
    work = ["a stream"]
    activity = Activity(lambda: bool(work), clock)
    clock.now += REST_AFTER_SECONDS
    assert not activity.is_resting
    work.clear()
    assert activity.is_resting


async def test_a_request_waits_for_each_poll(clock: Clock) -> None:
    activity = Activity(lambda: False, clock)
    clock.now += REST_AFTER_SECONDS
    fast, slow = Reader(activity), Reader(activity)
    async with running(fast, slow):
        slow.may_finish.clear()
        requests = [asyncio.create_task(activity.begin_request()) for _ in range(2)]
        await rounds_until(fast, 2)
        assert not any(request.done() for request in requests)
        slow.may_finish.set()
        await asyncio.gather(*requests)
        assert slow.rounds >= 2


async def test_a_request_does_not_wait_for_data_that_it_does_not_read(clock: Clock) -> None:
    activity = Activity(lambda: False, clock)
    clock.now += REST_AFTER_SECONDS
    used, unused = Reader(activity), Reader(activity, is_read_by_requests=False)
    async with running(used, unused):
        unused.may_finish.clear()
        async with asyncio.timeout(module.REFRESH_SECONDS / 2):
            await activity.begin_request()
        assert (used.rounds >= 2, unused.rounds) == (True, 1)
        unused.may_finish.set()
        await rounds_until(unused, 2)  # the request has ended its rest too


async def test_a_poll_that_is_blocked_delays_a_request_only_shortly(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.01)
    activity = Activity(lambda: False, clock)
    clock.now += REST_AFTER_SECONDS
    reader = Reader(activity)
    async with running(reader):
        reader.may_finish.clear()
        async with asyncio.timeout(5):
            await activity.begin_request()
        assert reader.rounds == 1


async def test_a_stopped_poll_delays_no_request(clock: Clock) -> None:
    activity = Activity(lambda: False, clock)
    clock.now += REST_AFTER_SECONDS
    async with running(Reader(activity)):
        pass
    async with asyncio.timeout(module.REFRESH_SECONDS / 2):
        await activity.begin_request()


async def test_polls_that_rest_run_concurrently(clock: Clock) -> None:
    activity = Activity(lambda: False, clock)
    clock.now += REST_AFTER_SECONDS + 0.5
    due = {clock.now + activity.rest(Poll(activity))}
    clock.now += 1.2
    due.add(clock.now + activity.rest(Poll(activity)))
    assert len({round(time, 6) for time in due}) == 1


async def test_calls_of_run_now_end_one_pause() -> None:
    reader = Reader(None, seconds=60)
    async with running(reader):
        reader.poll.run_now()
        reader.poll.run_now()
        await rounds_until(reader, 2)
        await asyncio.sleep(0.01)
        assert reader.rounds == 2
