"""An execution: the run of an admitted request on one target of its route."""

from __future__ import annotations

import time

import redis.asyncio as redis

from inference_worker.contract.messages import InferenceJob, Tokens
from inference_worker.contract.request import ServiceClass, TokenCounts
from millrace.gateway.admission.admission import AdmittedRequest
from millrace.gateway.admission.limits import is_long
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.types import ResponseSpec, encode_response_spec
from millrace.gateway.dispatch.answer_lookup import AnswerLookup
from millrace.gateway.dispatch.execution_state import (
    BEGUN_STATES,
    FINISHED_STATES,
    TRANSITIONS,
    UNCLAIMED_STATES,
    ExecutionState,
)
from millrace.gateway.dispatch.streams import EventBuffer, LogEvent


class Execution:
    """An execution, with its state (execution_state.py). What was decided before it is in `admitted`."""

    def __init__(
        self,
        broker: redis.Redis,
        admitted: AdmittedRequest,
        job: InferenceJob,
        response_spec: ResponseSpec,
        decision_record: DecisionRecord,
        first_attempt: int = 1,
    ) -> None:
        """Create an execution.

        Args:
            decision_record: of the request; the dispatcher adds its placements.
            first_attempt: executions of a request use different attempt numbers, so their logs are separate.
        """
        self.admitted = admitted
        self.job = job
        self.response_spec = response_spec
        self.encoded_response_spec = encode_response_spec(response_spec)  # for gateways that resume the stream
        self.decision_record = decision_record
        self.request_id = job.billing_context.request_id
        self.execution = job.billing_context.execution
        self.model = job.billing_context.model
        self.deployment_key = job.deployment_key  # key of the replicas that can run the execution
        self.tenant = job.billing_context.tenant_id
        self.batch = job.service_class == ServiceClass.BATCH
        self.buffer = EventBuffer(broker, self.request_id, first_attempt)
        self.state = ExecutionState.NEW
        self.written = False  # its claim record is in Valkey, in any state
        self.target: str | None = None  # the replica that the wakeup was sent to
        self.owner: str | None = None  # the replica that claimed it
        self.prefix_hash = b""  # identifies the start of its prompt (see placement)
        self.cached: dict[str, int] = {}  # replica -> tokens of its prompt that are cached by the replica's digest,
        self.cached_at = -1  # in this version of the index of digests
        self.predicted_cached: int | None = None  # tokens of its prompt that are cached by the replica's digest
        self.retry_after: float | None = None  # seconds, reported with its failure
        self.lost_replicas = 0  # the number of replicas that were lost while they ran it
        self.moves = 0  # how often it was moved away from a suspected replica
        self.created_at = time.monotonic()
        self.waiting_since = self.created_at  # start of the wait for a replica, in this attempt
        self.sent_at = self.waiting_since
        self.notified_at = self.waiting_since
        self.first_token_at: float | None = None  # monotonic time of the first token
        self.completed_at: float | None = None  # monotonic time of the end of a completed answer
        self.finish_reason = ""  # reason of a completed answer
        self.call_arguments: dict[tuple[int, int], str] = {}  # arguments of tool calls that an upstream has parsed
        self.output_tokens = 0  # number of generated tokens, from the events
        self.completion_texts: dict[int, list[str]] = {}  # choice -> texts, if the tenant stores content
        self.usage: TokenCounts | None = None
        self.answer: AnswerLookup | None = None  # its state in the answer cache, if the cache is used
        self.whole_prompt: list[int] | None = None  # tokens of a conversation of which a part is summarized
        self.has_summary = False  # the prompt contains the summary of that part

    @property
    def attempt(self) -> int:
        return self.buffer.attempt

    def set_job(self, admitted: AdmittedRequest, job: InferenceJob, response_spec: ResponseSpec) -> None:
        """Replace what an execution that was not dispatched will run."""
        self.admitted, self.job, self.response_spec = admitted, job, response_spec
        self.encoded_response_spec = encode_response_spec(response_spec)

    def advance(self, state: ExecutionState) -> bool:
        """Change the state, if the transition is allowed. Return whether it is."""
        if state not in TRANSITIONS[self.state]:
            return False
        self.state = state
        return True

    @property
    def is_queued(self) -> bool:
        """Return whether it waits for a replica with capacity."""
        return self.state is ExecutionState.QUEUED

    @property
    def is_unclaimed(self) -> bool:
        """Return whether it was sent and no replica has claimed it."""
        return self.state in UNCLAIMED_STATES

    @property
    def has_begun(self) -> bool:
        """Return whether an event of the current attempt was accepted, so no other attempt may start."""
        return self.state in BEGUN_STATES

    @property
    def is_finished(self) -> bool:
        """Return whether no replica sends further events."""
        return self.state in FINISHED_STATES

    @property
    def is_closed(self) -> bool:
        """Return whether what it reserved is released."""
        return self.state is ExecutionState.CLOSED

    @property
    def has_failed(self) -> bool:
        """Return whether it has ended and is not billed."""
        return self.usage is None and (self.is_read or self.is_closed)

    @property
    def is_read(self) -> bool:
        """Return whether the request has read its last event."""
        return self.buffer.is_read

    @property
    def cache_layer(self) -> str:
        """Return the origin of its answer; empty if its usage is not known."""
        if self.usage is None:
            return ""
        if self.answer is not None and self.answer.layer:
            return self.answer.layer
        return "prefix" if self.usage.cache_read else "computed"

    @property
    def cost(self) -> int:
        """Return the maximum number of tokens, prompt and completions together."""
        return self.job.num_prompt_tokens + self.job.params.max_tokens * self.job.params.n

    @property
    def is_long(self) -> bool:
        """Return whether it waits in the tenant's lane for long prompts."""
        return is_long(self.admitted.demand.limit_sets, self.job.num_prompt_tokens)

    def add_calls(self, event: Tokens) -> None:
        """Collect the arguments of an upstream's tool calls."""
        for call in event.calls:
            place = event.index, call.number
            self.call_arguments[place] = self.call_arguments.get(place, "") + call.arguments

    async def next_event(self) -> LogEvent:
        return await self.buffer.get()
