"""The words gateway, worker and settler exchange over the broker: msgpack, never pickle.

The worker sends a gateway `StreamEvent`s on the stream `millrace:gateway_events:<gateway>`, and keeps them, in order,
in the list `millrace:request_events:<request>:<attempt>` for readers that resume. Event `seq` n of an attempt is
element n of its list.

All keys and channels begin with `millrace:`.
"""

from __future__ import annotations

import msgspec

from inference_worker.contract.metric_families import MetricsSnapshot
from inference_worker.contract.request import (
    CacheBreakpoint,
    FinishReason,
    SamplingParams,
    ServiceClass,
    StructuredSpec,
    TokenLogprobs,
    TokenUsage,
)

USAGE_STREAM = "millrace:usage_events"
USAGE_GROUP = "settler"
# A hash: replica id -> Heartbeat. The gateway judges liveness by change, on its own clock.
REPLICAS_KEY = "millrace:replicas"
EXITS_KEY = "millrace:replica_exits"  # a sorted set of the replicas whose process is known to have exited: see exits.py
# A hash: worker's name -> "cordon" or "drain". What runs under that name gets no new work.
CORDONS_KEY = "millrace:cordons"
HEARTBEAT_SECONDS = 0.5
REPLICA_SUSPECT_SECONDS = 2.5  # a replica silent for longer gets no new work
REPLICA_LOST_SECONDS = 10.0  # a replica silent for longer is lost: its begun executions fail
# How long `millrace:replica_heartbeat:<replica>` outlives a beat. What is left of it is the beat's age, by one clock.
HEARTBEAT_TTL_MS = 60_000
INFERENCE_KEY_PREFIX = "millrace:inference:"  # of the keys of the inference worker's Celery app


def claim_key(request_id: str, leg: int) -> str:
    return f"millrace:claim:{request_id}:{leg}"


def gateway_stream(gateway_id: str) -> str:
    return f"millrace:gateway_events:{gateway_id}"


def request_log(request_id: str, attempt: int) -> str:
    return f"millrace:request_events:{request_id}:{attempt}"


def pins_key(tenant_id: int) -> str:
    return f"millrace:pins:{tenant_id}"


def control_channel(replica_id: str) -> str:
    return f"millrace:replica_control:{replica_id}"


def replica_queue(replica_id: str) -> str:
    """Return the Celery name of a replica's queue."""
    return f"replica.{replica_id}"


def replica_queue_key(replica_id: str) -> str:
    """Return the key of the list that is a replica's queue."""
    return f"{INFERENCE_KEY_PREFIX}{replica_queue(replica_id)}"


def replica_queue_keys(replica_id: str) -> tuple[str, str]:
    """Return the keys of a replica's queue and of its binding."""
    return replica_queue_key(replica_id), f"{INFERENCE_KEY_PREFIX}_kombu.binding.{replica_queue(replica_id)}"


def beat_key(replica_id: str) -> str:
    return f"millrace:replica_heartbeat:{replica_id}"


def worker_of(replica_id: str) -> str:
    """Return the name of the worker whose start made the replica: what a cordon goes by, so that it outlives a
    restart."""
    return replica_id.rpartition(".")[0] or replica_id


def trace_id(traceparent: str) -> str:
    """Return the trace that a `traceparent` belongs to; empty for an empty one."""
    return traceparent[3:35]


class BillingContext(msgspec.Struct, frozen=True):
    """Who a leg is for and on what terms: travels with the job and comes back, unread, on its usage event."""

    admitted_at: int  # microseconds since 1970, UTC
    request_id: str
    leg: int
    tenant_id: int
    project_id: int
    key_id: int
    model: str
    price_version: int | None = None
    slice_id: int | None = None
    fence: int | None = None
    hold: int | None = None  # nano-USD
    hold_tokens: int | None = None
    traceparent: str = ""  # W3C Trace Context

    def log_fields(self) -> dict[str, object]:
        """Return what every log line about the leg names."""
        return {
            "request_id": self.request_id,
            "leg": self.leg,
            "tenant_id": self.tenant_id,
            "key_id": self.key_id,
            "trace_id": trace_id(self.traceparent),
        }


class InferenceJob(msgspec.Struct, frozen=True):
    """One leg's work, as the gateway hands it to whichever worker claims it."""

    billing_context: BillingContext
    gateway_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: bytes  # derived by the gateway from tenant, model and a server secret
    deadline: float  # Unix seconds after which nobody waits any more
    weight: float = 1.0  # the tenant's share of the engine
    service_class: ServiceClass = ServiceClass.DEFAULT
    priority: int = 0  # among the tenant's own of one class: lower first
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    structured: StructuredSpec | None = None
    input_lengths: tuple[int, ...] = ()  # to be embedded: how the prompt divides into inputs, one after another
    warm_on: tuple[str, ...] = ()  # replicas that computed a prompt with this one's start lately


class ExecutionUsage(msgspec.Struct, frozen=True):
    """What a leg used; settled exactly once by (request_id, leg)."""

    billing_context: BillingContext
    attempt: int
    verdict: str  # "completed", "cancelled" or "failed"; a failed leg is never billed
    finish_reason: str
    usage: TokenUsage
    replica_id: str
    block_size: int
    queue_us: int = 0
    ttft_us: int = 0
    duration_us: int = 0
    miss_reason: str = ""  # why the prefix cache did not give the whole prompt, or "other_worker"; empty: it did
    changed_at: int | None = None  # first token at which the prompt leaves the one cached before ("prefix_changed")
    unpinned_tokens: int = 0  # before breakpoints, and not pinned because a cap on pins was reached
    answer_hit_input: int = 0  # tokens of the prompt, and of the answer, that an answer from a cache made needless
    answer_hit_output: int = 0


class Claimed(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A worker has taken the request and will answer for it. Not part of the request's log."""

    request_id: str
    attempt: int
    replica_id: str


class Released(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A draining worker gave the request back before its first token; `attempt` is the next one, to be dispatched."""

    request_id: str
    attempt: int


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """What was generated of one answer since the last event of it."""

    request_id: str
    attempt: int
    seq: int
    token_ids: list[int]
    text: str
    index: int = 0  # which of the request's answers
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, if they were asked for
    prompt: TokenUsage | None = None  # the prompt's tokens by class, with an attempt's first event
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt tokens 1 on, with answer 0's first event


class Vectors(msgspec.Struct, frozen=True, array_like=True, tag="v"):
    """What the inputs were embedded to. Only in the request's log: the gateway hears of the end, and reads it there."""

    request_id: str
    attempt: int
    seq: int
    data: bytes  # float32, little-endian, one vector after another in the inputs' order


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The last event of one of several answers, while others go on."""

    request_id: str
    attempt: int
    seq: int
    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None


class End(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The last event of a finished request: of the answer, or of the one of several that had not finished yet. Carries
    the usage the client is told and the tenant is billed."""

    request_id: str
    attempt: int
    seq: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: TokenUsage


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The last event of a request that could not be served (`code` as in the public error table)."""

    request_id: str
    attempt: int
    seq: int
    code: str
    message: str
    param: str | None = None


AnswerEvent = Tokens | Vectors | Finished | End
StreamEvent = Claimed | Released | AnswerEvent | Failed


class Machine(msgspec.Struct, frozen=True):
    """What a replica runs on, and as what. Never changes during its life."""

    version: str  # Millrace's
    device: str  # "cpu", or the GPU's name
    cores: int  # that the process may use
    dtype: str  # the numbers it computes in
    max_model_len: int  # tokens
    block_size: int  # tokens of a KV cache block


class Heartbeat(msgspec.Struct, frozen=True):
    """What a replica says of itself twice a second. `beat` only ever grows: a value seen before is no news."""

    beat: int
    model: str
    ready: bool
    draining: bool
    running: int  # requests in the engine's batch
    waiting: int  # requests claimed and not yet scheduled
    max_num_seqs: int
    kv_blocks: int
    kv_blocks_used: int
    metrics: MetricsSnapshot | None = None  # all that the engine has counted since its start
    batch: int = 0  # of running and waiting, those of the batch class
    machine: Machine | None = None
    cpu_seconds: float = 0.0  # processor time the process has used since its start
    disk_low: bool = False  # the replica takes no new requests: its disk is almost full


encode = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(InferenceJob).decode
decode_usage = msgspec.msgpack.Decoder(ExecutionUsage).decode
decode_event = msgspec.msgpack.Decoder(StreamEvent).decode
decode_events = msgspec.msgpack.Decoder(list[StreamEvent]).decode
decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode
