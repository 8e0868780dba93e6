"""Waiting for conditions. The variable TEST_WAIT_SECONDS is the limit of all waits that have no other bound."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from time import monotonic, sleep  # the functions, since some tests replace the module's attributes
from typing import TypeVar

Found = TypeVar("Found")

WAIT_SECONDS = float(os.environ.get("TEST_WAIT_SECONDS", "120"))
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.002, 0.05  # a check takes CPU time from the processes that the test waits for
FAILURE = "the condition did not become true in {:g} seconds"


def eventually(
    check: Callable[[], Found],
    seconds: float = WAIT_SECONDS,
    *,
    ignored: tuple[type[Exception], ...] = (),
    describe: Callable[[], object] = lambda: "",
) -> Found:
    """Wait until the check returns a true value, and return it.

    Args:
        ignored: exceptions of the check that count as false.
        describe: returns a text for the message of a failure, such as a process's log.
    """
    give_up_at, pause = monotonic() + seconds, MIN_PAUSE_SECONDS
    while True:
        try:
            if found := check():
                return found
        except ignored:
            if monotonic() >= give_up_at:
                raise
        assert monotonic() < give_up_at, f"{FAILURE.format(seconds)}\n{describe()}"
        sleep(pause)
        pause = min(MAX_PAUSE_SECONDS, 1.5 * pause)


async def eventually_async(check: Callable[[], Found | Awaitable[Found]], seconds: float = WAIT_SECONDS) -> Found:
    """Do the same in an event loop. The check may be a coroutine function."""
    pause = MIN_PAUSE_SECONDS
    try:
        async with asyncio.timeout(seconds):
            while True:
                found = check()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(pause)
                pause = min(MAX_PAUSE_SECONDS, 1.5 * pause)
    except TimeoutError as exc:
        raise AssertionError(FAILURE.format(seconds)) from exc
