"""The states of executions in the dispatcher, for random orders of claims, events, losses and cancellations."""

from __future__ import annotations

from collections import Counter

import pytest
import redis.asyncio as redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_worker.contract.messages import (
    BillingContext,
    Claimed,
    End,
    Failed,
    Heartbeat,
    InferenceJob,
    Released,
    Tokens,
    encode,
)
from inference_worker.contract.request import SamplingParams, TokenCounts
from millrace.gateway.admission.admission import AdmittedRequest
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_state import FINISHED_STATES, TRANSITIONS, ExecutionState
from tests.support.gateway.keys import make_demand, make_key

S = ExecutionState
REPLICAS = ("ra", "rb")
ERROR = ApiError("timeout", "")
USAGE = TokenCounts(uncached=2, output=1)
NUMBERS = st.integers(0, 1000)


def make_dispatcher() -> Dispatcher:
    """Return a dispatcher without Valkey, with two replicas that take three executions each."""
    broker = redis.Redis()
    dispatcher = Dispatcher(broker, broker, "gw-a", queue_seconds=5, retention_seconds=60)
    for beat in (1, 2):
        payload = encode(Heartbeat(beat, "m", True, False, 0, 0, 1, 10, 0))
        dispatcher.replicas.update({name.encode(): payload for name in REPLICAS})
        dispatcher.placement.observe()
    return dispatcher


def make_execution(dispatcher: Dispatcher, number: int = 0) -> Execution:
    context = BillingContext(0, f"req_{number}", 0, 1, 1, 1, "m")
    job = InferenceJob(context, "gw-a", [1, 2], SamplingParams(), b"salt", 0.0)
    admitted = AdmittedRequest(make_demand(make_key(), context.request_id), 20)
    spec = ResponseSpec("completions", context.request_id, "m", 0, 2)
    return Execution(dispatcher.broker, admitted, job, spec, DecisionRecord())


class Executions(RuleBasedStateMachine):
    """Executions of one dispatcher, and the states that they must have."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = make_dispatcher()
        self.made: list[Execution] = []
        self.expected: dict[Execution, ExecutionState] = {}

    def pick(self, number: int) -> Execution:
        return self.made[number % len(self.made)]

    def expect(self, execution: Execution, state: ExecutionState) -> None:
        """Expect a state, unless the execution has one that this state may not follow."""
        before = self.expected[execution]
        if before is S.CLOSED or (before in FINISHED_STATES and state not in FINISHED_STATES):
            return
        if (before, state) in ((S.OVERDUE, S.ENDED), (S.OVERDUE, S.FINISHED), (S.ENDED, S.FINISHED)):
            return
        if before is S.STREAMING and state not in FINISHED_STATES:
            return
        self.expected[execution] = state

    @precondition(lambda self: len(self.made) < 10)
    @rule()
    def submit(self) -> None:
        execution = make_execution(self.dispatcher, len(self.made))
        self.made.append(execution)
        self.expected[execution] = S.QUEUED
        self.dispatcher.submit(execution)

    @precondition(lambda self: self.made)
    @rule(number=NUMBERS, replica=st.sampled_from(REPLICAS))
    def claim(self, number: int, replica: str) -> None:
        """A replica claims the execution, possibly by an earlier wakeup, or after the execution has finished."""
        execution = self.pick(number)
        self.expect(execution, S.CLAIMED)
        self.dispatcher._accept(Claimed(execution.request_id, execution.attempt, replica))

    @precondition(lambda self: self.made)
    @rule(number=NUMBERS)
    def generate(self, number: int) -> None:
        execution = self.pick(number)
        self.expect(execution, S.STREAMING)
        self.dispatcher._accept(Tokens(execution.request_id, execution.attempt, 0, [5], "a"))

    @precondition(lambda self: self.made)
    @rule(number=NUMBERS, fails=st.booleans())
    def end(self, number: int, fails: bool) -> None:
        execution = self.pick(number)
        name, attempt = execution.request_id, execution.attempt
        if execution.request_id in self.dispatcher.executions:
            self.expect(execution, S.ENDED)
        self.dispatcher._accept(
            Failed(name, attempt, 1, "x", "") if fails else End(name, attempt, 1, "stop", None, USAGE)
        )

    @precondition(lambda self: self.made)
    @rule(number=NUMBERS)
    def release_claim(self, number: int) -> None:
        """The replica gives the execution back without an event."""
        execution = self.pick(number)
        self.expect(execution, S.QUEUED)
        self.dispatcher._accept(Released(execution.request_id, execution.attempt + 1))

    @precondition(lambda self: self.made)
    @rule(number=NUMBERS, is_same_attempt=st.booleans())
    def lose_replica(self, number: int, is_same_attempt: bool) -> None:
        """The monitor moves an execution without an event."""
        execution = self.pick(number)
        if execution.has_begun or execution.is_finished:
            return
        self.expect(execution, S.QUEUED)
        if not is_same_attempt:
            self.dispatcher.restart(execution, execution.attempt + 1)
        elif not execution.is_queued:
            self.dispatcher.requeue(execution)

    @precondition(lambda self: self.made)
    @rule(number=NUMBERS)
    def renotify(self, number: int) -> None:
        execution = self.pick(number)
        if self.expected[execution] in (S.QUEUED, S.RESENT) and execution.is_unclaimed:
            self.expected[execution] = S.RESENT
        self.dispatcher.renotify(execution)

    @precondition(lambda self: self.made)
    @rule(number=NUMBERS, is_overdue=st.booleans())
    def fail(self, number: int, is_overdue: bool) -> None:
        execution, state = self.pick(number), S.OVERDUE if is_overdue else S.FINISHED
        self.expect(execution, state)
        self.dispatcher.fail_locally(execution, ERROR, state)

    @precondition(lambda self: self.made)
    @rule(number=NUMBERS)
    def close(self, number: int) -> None:
        """The request ends."""
        execution = self.pick(number)
        self.expected[execution] = S.CLOSED
        self.dispatcher.release(execution)

    @invariant()
    def has_expected_states(self) -> None:
        for execution, expected in self.expected.items():
            # Whether a queued execution was sent depends on the capacity of the replicas.
            allowed = {S.QUEUED, S.SENT} if expected is S.QUEUED else {expected}
            assert execution.state in allowed

    @invariant()
    def is_queued_once(self) -> None:
        queue = self.dispatcher._queue("m", batch=False)
        lanes = [lane for entry in queue._tenants.values() for lane in (entry.short, entry.long)]
        waiting = Counter(execution for lane in lanes for execution, _ in lane.waiting)
        assert waiting == Counter(execution for execution in self.made if execution.is_queued)
        assert len(queue) == waiting.total()

    @invariant()
    def counts_the_loads_of_replicas(self) -> None:
        placement = self.dispatcher.placement
        for replica in REPLICAS:
            placed = [execution for execution in self.made if execution.target == replica]
            assert placement._local[replica, False] == len(placed)
            assert placement._claimed[replica, False] == sum(execution.owner == replica for execution in placed)
        for execution in self.made:
            if execution.is_finished or execution.is_queued:
                assert (execution.target, execution.owner) == (None, None)


Executions.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestExecutions = Executions.TestCase


def test_every_state_is_reachable_and_can_be_closed() -> None:
    assert TRANSITIONS.keys() == set(S)
    assert TRANSITIONS[S.CLOSED] == set()
    reachable, closable = {S.NEW}, {S.CLOSED}
    for _ in S:
        reachable |= {after for state in reachable for after in TRANSITIONS[state]}
        closable |= {state for state in S if TRANSITIONS[state] & closable}
    assert reachable == closable == set(S)


@pytest.mark.parametrize("before", S)
@pytest.mark.parametrize("after", S)
def test_only_the_transitions_of_the_table_are_made(before: ExecutionState, after: ExecutionState) -> None:
    execution = make_execution(make_dispatcher())
    execution.state = before
    is_allowed = after in TRANSITIONS[before]
    assert execution.advance(after) == is_allowed
    assert execution.state is (after if is_allowed else before)


def test_a_claim_that_arrives_after_a_cancellation_takes_no_capacity() -> None:
    dispatcher = make_dispatcher()
    execution = make_execution(dispatcher)
    dispatcher.submit(execution)
    assert execution.target is not None
    dispatcher.fail_locally(execution, ERROR)
    dispatcher._accept(Claimed(execution.request_id, execution.attempt, "ra"))
    dispatcher.release(execution)
    assert [dispatcher.placement.local_load(name) for name in REPLICAS] == [0, 0]
