"""The login throttle's counters: growing waits, known devices and concurrent attempts, with a fake clock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import redis

from tenants.login_throttle import ACCOUNT, ADDRESS, DEVICE, UNAVAILABLE_SECONDS, Throttle, Throttled, network_of

OWNER, HOME, DEVICE_ID = "owner@example.com", "192.0.2.1", "d1"


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def throttle(broker: redis.Redis, clock: Clock) -> Throttle:
    return Throttle(broker, clock)


def wait(
    throttle: Throttle, account: str = OWNER, address: str = HOME, device: str = "", step: str = "password"
) -> int:
    """Record a failed attempt; return 0 or the time that the attempt must wait."""
    try:
        throttle.begin(step, account, address, device)
    except Throttled as refusal:
        return refusal.seconds
    return 0


def addresses() -> Callable[[], str]:
    """Yield another address at each call."""
    numbers = iter(range(256, 2**16))
    return lambda: f"198.18.{divmod(next(numbers), 256)[0]}.{next(numbers) % 256}"


def test_waits_grow_up_to_a_limit(throttle, clock):
    address = addresses()
    assert [wait(throttle, address=address()) for _ in range(ACCOUNT.free)] == [0] * ACCOUNT.free
    waits = []
    for _ in range(14):
        waits.append(wait(throttle, address=address()))
        clock.now += waits[-1]
        assert wait(throttle, address=address()) == 0  # one attempt, then the next wait
    assert waits[:5] == [5, 10, 20, 40, 80]
    assert max(waits) == waits[-1] == ACCOUNT.longest.total_seconds()
    clock.now += ACCOUNT.forget.total_seconds() + 1
    assert [wait(throttle) for _ in range(ACCOUNT.free)] == [0] * ACCOUNT.free


def test_an_attempt_that_waits_is_not_counted(throttle, clock):
    for _ in range(ACCOUNT.free):
        wait(throttle)
    assert {wait(throttle) for _ in range(50)} == {5}
    clock.now += 5
    assert wait(throttle) == 0


def test_failures_from_other_addresses_do_not_delay_a_known_device(throttle, clock):
    address = addresses()
    checked = 0
    for _ in range(1000):
        checked += wait(throttle, address=address()) == 0
        clock.now += 1
    assert checked < 20
    assert wait(throttle) > 0
    for _ in range(5):
        throttle.begin("password", OWNER, HOME, DEVICE_ID).succeed()


def test_an_address_is_limited_but_known_devices_behind_it_can_sign_in(throttle, clock):
    found = [wait(throttle, account=f"user{n}@example.com") for n in range(ADDRESS.free + 5)]
    assert found == [0] * ADDRESS.free + [5] * 5
    assert wait(throttle, account="another@example.com") == 5
    assert wait(throttle, device=DEVICE_ID) == 0
    assert wait(throttle, account="another@example.com", address="192.0.2.2") == 0


def test_a_known_device_has_a_separate_limit_that_success_resets(throttle, clock):
    assert [wait(throttle, device=DEVICE_ID) for _ in range(DEVICE.free)] == [0] * DEVICE.free
    assert wait(throttle, device=DEVICE_ID) == 5
    assert wait(throttle, device="d2") == 0
    clock.now += 5
    throttle.begin("password", OWNER, HOME, DEVICE_ID).succeed()
    assert [wait(throttle, device=DEVICE_ID) for _ in range(DEVICE.free)] == [0] * DEVICE.free


def test_success_removes_only_its_own_count(throttle, clock):
    """Signing in to one's own account between guesses does not reset the address's count."""
    for n in range(ADDRESS.free - 1):
        assert wait(throttle, account=f"user{n}@example.com") == 0
        throttle.begin("password", "mine@example.com", HOME).succeed()
    assert wait(throttle, account="one-more@example.com") == 0
    assert wait(throttle, account="mine@example.com") == 5
    clock.now += 5
    throttle.begin("password", "mine@example.com", HOME).succeed()
    throttle.begin("password", "mine@example.com", HOME).succeed()
    assert wait(throttle, account="next@example.com") == 0
    assert wait(throttle, account="mine@example.com") == 10


def test_the_login_steps_of_an_account_count_separately(throttle):
    for _ in range(ACCOUNT.free):
        wait(throttle, step="password")
    assert wait(throttle, step="password") > 0
    assert wait(throttle, step="code") == 0
    assert wait(throttle, account=OWNER.upper(), step="password") > 0


def test_concurrent_attempts_share_the_limit(broker, clock):
    """Concurrent attempts check no more secrets than sequential ones, by any connection."""
    throttles = [Throttle(redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]), clock) for _ in range(8)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: wait(throttles[n % 8], address=f"198.51.100.{n}"), range(200)))
    assert found.count(0) == ACCOUNT.free


def _wait_in_process(n: int) -> int:
    client = redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"])
    return wait(Throttle(client, Clock()), address=f"198.51.100.{n}")


def test_it_works_across_processes(broker):
    with get_context("spawn").Pool(2) as pool:
        found = pool.map(_wait_in_process, range(2 * ACCOUNT.free), chunksize=1)
    assert found.count(0) == ACCOUNT.free


def test_stored_counters_are_limited_and_expire(throttle, broker):
    throttle.begin("password", "x" * 100_000, "y" * 100_000)
    throttle.begin("password", OWNER, HOME, "z" * 100_000)
    keys = broker.keys("millrace:throttle:*")
    assert len(keys) == 3
    assert all(len(key) < 64 and 0 < broker.pttl(key) <= 24 * 3600 * 1000 for key in keys)
    assert all(set(broker.hgetall(key)) == {b"count", b"closed", b"at"} for key in keys)


def test_without_valkey_no_secret_is_checked():
    throttle = Throttle(redis.Redis(host="127.0.0.1", port=1))
    assert wait(throttle) == UNAVAILABLE_SECONDS


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("", ""),
    ],
)
def test_ipv6_counts_by_network(address: Any, network: str) -> None:
    assert network_of(address) == network
