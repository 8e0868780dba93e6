"""The circuit breaker of an upstream: a table of histories, and any history against a model that reads the log."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_worker.worker.relay.circuit_breaker import (
    FIRST_OPEN_SECONDS,
    FORGET_SECONDS,
    HEAD_START_SECONDS,
    MAX_FAILURES,
    MAX_OPEN_SECONDS,
    MAX_REQUESTERS,
    CircuitBreaker,
    Requester,
    UpstreamAttempt,
)
from inference_worker.worker.relay.failures import UpstreamFailed, make_upstream_failure, response_failure

OPERATOR = 7
FAILURES = {
    "F": make_upstream_failure("Cut."),
    "T": response_failure(503, {}, b""),
    "U": make_upstream_failure("Unreachable.", is_unreachable=True),
    "Q": response_failure(429, {}, b""),
    "R": response_failure(400, {}, b""),
}


class Clock:
    """Seconds that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def enter(breaker: CircuitBreaker, requester: Requester) -> UpstreamAttempt:
    return breaker.enter(requester, requester.own_credential or OPERATOR)


def rejection(breaker: CircuitBreaker, requester: Requester) -> UpstreamFailed | None:
    """Return the rejection of a request; None: it was accepted, and has no effect."""
    try:
        attempt = enter(breaker, requester)
    except UpstreamFailed as exc:
        return exc
    breaker.note_abandoned(attempt)
    return None


def play(breaker: CircuitBreaker, history: str) -> None:
    """Run requests in turn: a word is the tenant, `*` if it uses its own credential, and the result of each request."""
    for word in history.split():
        requester = Requester(ord(word[0]), ord(word[0]) if "*" in word else None)
        for result in word[1:].replace("*", ""):
            attempt = enter(breaker, requester)
            if result == "S":
                breaker.note_success(attempt)
            elif result == "A":
                breaker.note_abandoned(attempt)
            else:
                breaker.note_failure(attempt, FAILURES[result])


A, B, C, OWN_A = Requester(ord("a")), Requester(ord("b")), Requester(ord("c")), Requester(ord("a"), ord("a"))

# Requests: S succeeds, F is cut, T gets 503, U finds no connection, Q gets 429, R gets 400, A is cancelled.
HISTORIES = {
    "aFFFF": ("", False),
    "aFFFFF": ("a", False),
    "aTTTTT": ("a", False),
    "aFFFFF bS": ("a", False),
    "aFFFF bS aF": ("a", False),
    "aFFFFS aFFFF": ("", False),
    "aFFFFRF": ("", False),
    "aFFFFQF": ("", False),
    "aQQQQQQQQ": ("", False),
    "aRRRRRRRR": ("", False),
    "aFFFFAF": ("a", False),
    "aFFFF bF": ("abc*", True),
    "aF bF aF bF aF": ("abc*", True),
    "aF bF cS aF bF aF bF": ("", False),
    "aFFFF cS bF": ("", False),
    "aFFFFF bF": ("abc*", True),
    "aUUUUU": ("abc*", True),
    "aFFFF bU": ("abc*", True),
    "aUUUUS aU": ("", False),
    "a*FFFFF": ("*", False),
    "a*FFFFF aS": ("*", False),
    "a*FFFFF bFFFF": ("*", False),
    "a*FFFFF bFFFFF": ("*b", False),
    "a*FFFF aF": ("", False),
    "a*UUUUU": ("abc*", True),
}


@pytest.mark.parametrize(("history", "paused", "is_open"), [(name, *found) for name, found in HISTORIES.items()])
def test_failures_in_turn_pause_only_the_tenants_that_the_rules_name(history: str, paused: str, is_open: bool) -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    play(breaker, history)
    requesters = {"a": A, "b": B, "c": C, "*": OWN_A}
    assert {name for name, one in requesters.items() if rejection(breaker, one)} == set(paused)
    assert breaker.is_open == is_open
    clock.now += FIRST_OPEN_SECONDS + HEAD_START_SECONDS
    assert not any(rejection(breaker, one) for one in requesters.values()), "each can be the probe"


def test_the_texts_name_the_cause() -> None:
    breaker = CircuitBreaker(Clock())
    play(breaker, "aFFFFF b*FFFFF")
    texts = [str(rejection(breaker, one)) for one in (A, Requester(ord("b"), ord("b")))]
    assert texts[0].startswith("Your last requests to this model failed at the model's provider")
    assert texts[1].startswith("Your last requests with your own credential failed at the model's provider")
    play(breaker, "cF")
    assert str(rejection(breaker, Requester(ord("d")))).startswith("The model's provider has no capacity")


def test_a_tenant_without_failures_is_the_probe_before_those_with_failures() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    play(breaker, "aFFF bFF")
    found = rejection(breaker, C)
    assert found is not None
    assert found.retry_after == FIRST_OPEN_SECONDS
    clock.now += FIRST_OPEN_SECONDS
    assert rejection(breaker, A)
    probe = enter(breaker, C)
    clock.now += HEAD_START_SECONDS
    assert all(rejection(breaker, one) for one in (A, B, C)), "one probe at a time"
    breaker.note_success(probe)
    assert not any(rejection(breaker, one) for one in (A, B, C))


def test_failures_of_requests_that_ran_before_do_not_extend_a_pause() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for attempt in [enter(breaker, one) for one in (A, B) * 50]:
        breaker.note_failure(attempt, FAILURES["F"])
    found = rejection(breaker, C)
    assert found is not None
    assert found.retry_after == FIRST_OPEN_SECONDS


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("value", ["999999999", "1e400", "inf", "Mon, 01 Jan 9999 00:00:00 GMT"])
@pytest.mark.parametrize("status", [429, 503, 529])
def test_a_pause_of_a_credential_that_tenants_share_is_at_most_a_minute(status: int, value: str, own: bool) -> None:
    failure = response_failure(status, {"retry-after": value}, b"", is_tenant_credential=own)
    assert failure.retry_after == (3600.0 if own else 60.0)
    clock = Clock()
    breaker = CircuitBreaker(clock)
    breaker.note_failure(enter(breaker, OWN_A if own else A), failure)
    assert bool(rejection(breaker, B)) != own
    assert rejection(breaker, OWN_A if own else A)
    clock.now += 60.0
    assert not rejection(breaker, B)


def test_the_memory_of_failures_is_bounded() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for number in range(3 * MAX_REQUESTERS):
        clock.now += 0.001
        attempt = enter(breaker, Requester(number, number))
        breaker.note_failure(attempt, FAILURES["F"])
        assert len(breaker._requesters) <= MAX_REQUESTERS
    clock.now += FORGET_SECONDS
    rejection(breaker, A)
    assert not breaker._requesters


class Result(NamedTuple):
    """The recorded end of a request."""

    at: float
    requester: Requester
    result: str
    probed: frozenset[object]  # circuits, "all" or a requester


class AnyHistory(RuleBasedStateMachine):
    """Requests of four tenants, two with an own credential, at any time, in parallel, with any result.

    The model derives each decision from the log of all results, by the rules of the guide.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = CircuitBreaker(self.clock)
        self.log: list[Result] = []
        self.running: list[tuple[UpstreamAttempt, frozenset[object]]] = []

    requesters = st.sampled_from(
        [Requester(1), Requester(2), Requester(3), Requester(4), Requester(1, 11), Requester(2, 12)]
    )

    def counted(self, circuit: object) -> list[Result]:
        """Return the failures in a row that a circuit counts."""
        row: list[Result] = []
        was_open = False
        for one in self.log:
            if row and not was_open and one.at - row[-1].at >= FORGET_SECONDS:
                row = []
            is_response = one.result in "SQR"
            if circuit == "all":
                if is_response:
                    row = []
                elif one.result == "U" or one.requester.own_credential is None:
                    row.append(one)
                was_open = is_common(row) and len(row) >= MAX_FAILURES
            elif is_response and (one.requester == circuit or "all" in self.open_before(one)):
                row = []
            elif one.requester == circuit and one.result != "U":
                row = [*row, one] if not row or one.at - row[-1].at < FORGET_SECONDS else [one]
        is_stale = row and not was_open and self.clock.now - row[-1].at >= FORGET_SECONDS
        return [] if is_stale else row

    def open_before(self, one: Result) -> set[object]:
        """Return {"all"} if the circuit of all tenants was open before a result, else an empty set."""
        index = next(number for number, other in enumerate(self.log) if other is one)
        earlier = AnyHistory.__new__(AnyHistory)
        earlier.clock, earlier.log = Clock(), self.log[:index]
        earlier.clock.now = one.at
        return {"all"} if earlier.open_until("all") is not None else set()

    def open_until(self, circuit: object) -> float | None:
        """Return when an open circuit accepts a probe; None: it is closed."""
        until, openings = None, 0
        row = self.counted(circuit)
        for number, one in enumerate(row, 1):
            can_open = circuit != "all" or is_common(row[:number])
            opens = circuit in one.probed if openings else can_open and number >= MAX_FAILURES
            if opens:
                openings += 1
                until = one.at + min(FIRST_OPEN_SECONDS * 2 ** (openings - 1), MAX_OPEN_SECONDS)
        return until

    def pause(self, requester: Requester) -> float:
        for circuit in (requester, "all"):
            until = self.open_until(circuit)
            if until is None:
                continue
            if any(circuit in probed for _, probed in self.running):
                return max(1.0, until - self.clock.now)
            has_failures = bool(self.counted(requester))
            until += HEAD_START_SECONDS if circuit == "all" and has_failures else 0.0
            if until > self.clock.now:
                return until - self.clock.now
        return 0.0

    @rule(requester=requesters)
    def request(self, requester: Requester) -> None:
        expected = self.pause(requester)
        opened = frozenset(circuit for circuit in (requester, "all") if self.open_until(circuit) is not None)
        try:
            attempt = enter(self.breaker, requester)
        except UpstreamFailed as exc:
            assert exc.retry_after == pytest.approx(expected)
            assert 0 < expected <= MAX_OPEN_SECONDS + HEAD_START_SECONDS
        else:
            assert expected == 0
            self.running.append((attempt, opened))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 100), result=st.sampled_from("SFFFFTTUQRA"))
    def end(self, number: int, result: str) -> None:
        attempt, probed = self.running.pop(number % len(self.running))
        if result == "A":
            self.breaker.note_abandoned(attempt)
            return
        if result == "S":
            self.breaker.note_success(attempt)
        else:
            self.breaker.note_failure(attempt, FAILURES[result])
        self.log.append(Result(self.clock.now, attempt.requester, result, probed))
        if result in "SQR":  # the circuits that it closed have no probe
            closed = {"all", attempt.requester} if "all" not in self.open_before(self.log[-1]) else None
            self.running = [
                (other, probes - closed if closed else frozenset[object]()) for other, probes in self.running
            ]

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 4.0, 61.0, FORGET_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def the_state_is_reported(self) -> None:
        assert self.breaker.is_open == (self.open_until("all") is not None)
        every = {one.requester for one in self.log}
        assert self.breaker.num_paused == sum(self.open_until(one) is not None for one in every)

    @invariant()
    def failures_of_one_tenant_pause_no_other(self) -> None:
        failed = {one.requester for one in self.log if one.result not in "SQR"}
        if len({one.tenant for one in failed}) == 1 and all(one.result != "U" for one in self.log):
            assert self.open_until("all") is None
            assert self.pause(Requester(99)) == 0


def is_common(row: list[Result]) -> bool:
    return any(one.result == "U" for one in row) or len({one.requester.tenant for one in row}) > 1


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
