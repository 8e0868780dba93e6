"""The messages between gateway, worker and settler in the broker, encoded as msgpack.

A worker sends `StreamEvent`s to a gateway on the stream `millrace:gateway_events:<gateway>`. It also stores them in
order in the list `millrace:request_events:<request>:<attempt>` for clients that resume. Event `seq` n of an attempt is
element n of its list.

All keys and channels start with `millrace:`.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import cached_property

import msgspec

from inference_worker.contract.compute_support import ComputeSupport, SlowReason
from inference_worker.contract.metric_families import MetricsSnapshot
from inference_worker.contract.request import (
    CacheBreakpoint,
    FinishReason,
    ReasoningSpec,
    SamplingParams,
    ServiceClass,
    StructuredSpec,
    TokenCounts,
    TokenLogprobs,
    ToolCallDelta,
)
from inference_worker.contract.settings import ModelSpec, deployment_key
from inference_worker.contract.upstreams import UpstreamRequest, UsageSource

USAGE_STREAM = "millrace:usage_events"
USAGE_GROUP = "settler"
# The timeline of PostgreSQL. The settler writes it every second, and it expires soon: see billing.metering.timeline.
TIMELINE_KEY = "millrace:database_timeline"
# A hash: replica id -> Heartbeat. The gateway detects liveness by changes, with its own clock.
REPLICAS_KEY = "millrace:replicas"
# A hash: process id of a worker -> WorkerSupport. The process runs while `beat_key` of its id exists.
SUPPORT_KEY = "millrace:worker_support"
EXITS_KEY = "millrace:replica_exits"  # a sorted set of replicas whose process has exited: see exits.py
# A hash: worker name -> "cordon" or "drain". These workers get no new work.
CORDONS_KEY = "millrace:cordons"
WORK_CHANNEL = "millrace:work"  # a message makes beat check whether tasks have work
HEARTBEAT_SECONDS = 0.5
REPLICA_SUSPECT_SECONDS = 2.5  # after this time without a heartbeat, a replica gets no new work
REPLICA_LOST_SECONDS = 10.0  # after this time without a heartbeat, a replica's started executions fail
# TTL of `millrace:replica_heartbeat:<replica>`, also of a process without replicas. The remaining TTL gives the
# heartbeat's age by the broker's clock.
HEARTBEAT_TTL_MS = 60_000
METRICS_SECONDS = 1.0  # between writes of a replica's metrics, which only readers of metrics read
METRICS_TTL_SECONDS = 60
# TTL of `wakeup_sent_key`: a task that was not received after this time is considered lost, and another is sent.
TASK_LOST_MS = 1000
GATEWAY_STREAM_LENGTH = 10_000  # batches; a gateway that is further behind reads the event logs
INFERENCE_KEY_PREFIX = "millrace:inference:"  # beginning of the keys of the inference worker's Celery app


def claim_key(request_id: str, execution: int) -> str:
    return f"millrace:claim:{request_id}:{execution}"


def gateway_stream(gateway_id: str) -> str:
    return f"millrace:gateway_events:{gateway_id}"


def event_log_key(request_id: str, attempt: int) -> str:
    return f"millrace:request_events:{request_id}:{attempt}"


def pins_key(tenant_id: int) -> str:
    return f"millrace:pins:{tenant_id}"


def process_of(replica_id: str) -> str:
    """Return the ID of the replica's process. A process can have several replicas: `<worker>.<random>-<number>`."""
    worker, dot, suffix = replica_id.rpartition(".")
    return f"{worker}.{suffix.partition('-')[0]}" if dot else replica_id


def control_channel(replica_id: str) -> str:
    return f"millrace:replica_control:{process_of(replica_id)}"


def replica_queue(replica_id: str) -> str:
    """Return the Celery name of the queue of a replica's process."""
    return f"replica.{process_of(replica_id)}"


def replica_queue_key(replica_id: str) -> str:
    """Return the key of the list that is the queue of a replica's process."""
    return f"{INFERENCE_KEY_PREFIX}{replica_queue(replica_id)}"


def wakeups_key(replica_id: str) -> str:
    """Return the key of the list of executions that a replica may claim and that no task names: a `Wakeup` each."""
    return f"millrace:replica_wakeups:{replica_id}"


def wakeup_sent_key(replica_id: str) -> str:
    """Return the key that exists while a task is on its way to a replica or serves executions, and reads the list."""
    return f"millrace:replica_wakeup_sent:{replica_id}"


def replica_keys(replica_id: str) -> tuple[str, ...]:
    """Return the keys of a replica's wakeups, and those of its process's queue if it is the process's first replica."""
    keys = wakeups_key(replica_id), wakeup_sent_key(replica_id)
    if replica_id != process_of(replica_id):
        return keys
    binding = f"{INFERENCE_KEY_PREFIX}_kombu.binding.{replica_queue(replica_id)}"
    return replica_queue_key(replica_id), binding, *keys


def beat_key(replica_id: str) -> str:
    return f"millrace:replica_heartbeat:{replica_id}"


def metrics_key(replica_id: str) -> str:
    """Return the key of a replica's MetricsSnapshot since its engine's start."""
    return f"millrace:replica_metrics:{replica_id}"


def worker_of(replica_id: str) -> str:
    """Return the name of the replica's worker. Cordons use this name, so that they outlive a restart."""
    return replica_id.rpartition(".")[0] or replica_id


def trace_id(traceparent: str) -> str:
    """Return the trace id of a `traceparent`; empty if it is empty."""
    return traceparent[3:35]


class BillingContext(msgspec.Struct, frozen=True):
    """The owner and the billing terms of an execution. It is sent with the job and returned unchanged in the usage
    event."""

    admitted_at: int  # microseconds since 1970, UTC
    request_id: str
    execution: int
    tenant_id: int
    project_id: int
    key_id: int
    model: str
    price_version: int | None = None
    lease_id: int | None = None
    fencing_token: int | None = None
    reserved_nano: int | None = None  # nano-USD
    reserved_tokens: int | None = None
    traceparent: str = ""  # W3C Trace Context
    is_operator_paid: bool = False  # its cost is booked, but the tenant has no usage event
    end_user: str = ""  # `user` of the request

    def log_fields(self) -> dict[str, object]:
        """Return the fields of every log line about the execution."""
        return {
            "request_id": self.request_id,
            "execution": self.execution,
            "tenant_id": self.tenant_id,
            "key_id": self.key_id,
            "trace_id": trace_id(self.traceparent),
        }


class InferenceJob(msgspec.Struct, frozen=True):
    """The work of one execution, which the gateway sends to the worker that claims it."""

    billing_context: BillingContext
    gateway_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: bytes  # derived by the gateway from the tenant, the model's version and a server secret
    deadline: float  # Unix seconds after which the request has timed out
    weight: float = 1.0  # the tenant's share of the engine
    service_class: ServiceClass = ServiceClass.DEFAULT
    priority: int = 0  # among the tenant's requests of one class: lower first
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    structured: StructuredSpec | None = None
    reasoning: ReasoningSpec | None = None
    input_lengths: tuple[int, ...] = ()  # for an encoder: lengths of the consecutive inputs in the prompt
    second_starts: tuple[int, ...] = ()  # for a cross-encoder: the position of the second text in each input
    searches: int = 0  # for a cross-encoder: the searches that the request is billed for
    replicas_with_prefix: tuple[str, ...] = ()  # replicas that recently computed a prompt with the same start
    version: str = ""  # version of the deployment that the prompt was tokenized for
    upstream: UpstreamRequest | None = None  # instead of the prompt's tokens, if an upstream runs the deployment
    credential: int | None = None  # the id of the upstream credential: the tenant's own, or the deployment's
    is_tenant_credential: bool = False  # the credential is the tenant's own
    speculates: bool = True  # whether drafts may be verified, if the replica's settings allow it
    prediction: tuple[int, ...] = ()  # tokens of the expected output, a source of drafts
    hides_output: bool = False  # the client requested no tokens; the one that is generated is neither sent nor billed

    @property
    def deployment_key(self) -> str:
        return deployment_key(self.billing_context.model, self.version)

    @property
    def num_prompt_tokens(self) -> int:
        """The number of the prompt's tokens; for an upstream, an upper bound."""
        return len(self.prompt_token_ids) if self.upstream is None else self.upstream.prompt_tokens


class ExecutionUsage(msgspec.Struct, frozen=True, dict=True):
    """The usage of an execution. It is settled exactly once by (request_id, execution)."""

    billing_context: BillingContext
    attempt: int
    outcome: str  # "completed", "cancelled" or "failed"; a failed execution is never billed
    finish_reason: str
    usage: TokenCounts
    replica_id: str
    block_size: int
    queue_us: int = 0
    ttft_us: int = 0
    duration_us: int = 0
    miss_reason: str = ""  # why the prompt was not cached completely; empty: it was
    changed_at: int | None = None  # first token that differs from the previously cached prompt ("prefix_changed")
    unpinned_tokens: int = 0  # before breakpoints, but not pinned because of a limit on pins
    reasoning_tokens: int = 0  # output tokens that are reasoning
    usage_source: UsageSource = "engine"
    credential: int | None = None  # the upstream credential that the execution used
    is_tenant_credential: bool = False  # the tenant's own credential costs the operator nothing
    accepted_drafts: int = 0  # draft tokens that were verified; accepted ones are part of the output
    rejected_drafts: int = 0
    host_tokens: int = 0  # prompt tokens read from the prefix cache in CPU memory
    # What the upstream reported, if it is more than the request can use: the operator's cost.
    reported_usage: TokenCounts | None = None

    @cached_property
    def encoded(self) -> bytes:
        """Return the message, for the journal and the broker."""
        return encode(self)


class Claimed(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """The worker has claimed the execution. Not part of the request's event log."""

    request_id: str
    attempt: int
    replica_id: str


class Released(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A draining worker released the request before its first token. `attempt` is the next one, to be dispatched."""

    request_id: str
    attempt: int


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The tokens generated for one output sequence since its previous event."""

    request_id: str
    attempt: int
    seq: int
    token_ids: list[int]
    text: str
    index: int = 0  # number of the output sequence
    logprobs: list[TokenLogprobs] | None = None  # log-probabilities of token_ids, if requested
    prompt: TokenCounts | None = None  # the prompt's tokens by class, with an attempt's first event
    prompt_logprobs: list[TokenLogprobs] | None = (
        None  # those of all prompt tokens but the first, with the first event of sequence 0
    )
    reasoning: str = ""  # text of the reasoning, which comes before `text`
    reasoning_tokens: int = 0  # tokens that are now known to be part of the reasoning
    # Only of upstreams, which send text instead of tokens: tool calls after `text`, and the reasoning's signature.
    calls: list[ToolCallDelta] = []
    signature: str = ""


class Vectors(msgspec.Struct, frozen=True, array_like=True, tag="v"):
    """The vectors of an embedding request, or the scores of a rerank request, one number for each input.

    Only in the event log: the gateway receives `End` and reads them there.
    """

    request_id: str
    attempt: int
    seq: int
    data: bytes  # float32, little-endian, in the order of the inputs


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The last event of one of several output sequences, while others are unfinished."""

    request_id: str
    attempt: int
    seq: int
    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None


class End(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The last event of a completed request, or of its last output sequence. It contains the usage that is reported to
    the client and billed."""

    request_id: str
    attempt: int
    seq: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: TokenCounts
    accepted_drafts: int = 0  # draft tokens that were verified; accepted ones are part of the output
    rejected_drafts: int = 0


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The last event of a failed request. `code` is a public error code."""

    request_id: str
    attempt: int
    seq: int
    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None  # seconds


AnswerEvent = Tokens | Vectors | Finished | End
StreamEvent = Claimed | Released | AnswerEvent | Failed


class Machine(msgspec.Struct, frozen=True):
    """The machine and configuration of a replica. It never changes while the replica runs."""

    version: str  # Millrace's
    device: str  # "cpu", or the GPU's name
    cores: int  # usable by the process
    dtype: str  # dtype of the computation
    max_model_len: int  # tokens
    block_size: int  # tokens of a KV cache block
    slow: SlowReason | None = None  # why the model uses a slower backend than the machine's default
    bundle: str = ""  # SHA-256 of the model's bundle; empty: an upstream runs the model
    weights: str = ""  # identity of the model's weights

    @property
    def variant(self) -> bytes:
        """What distinguishes the cached prefixes of this replica from those of others with the same deployment key.

        It is empty if an upstream runs the model.
        """
        name = f"{self.bundle}\0{self.weights}\0{self.dtype}".encode()
        return hashlib.blake2b(name, digest_size=16).digest() if self.bundle else b""


class ReplicaPhase(StrEnum):
    """The phase of a deployment's replica in its worker."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"  # the model could not be loaded; it is tried again
    UNLOADED = "unloaded"  # after idle time; a request loads it


class Heartbeat(msgspec.Struct, frozen=True):
    """The state of a replica, sent twice a second. `beat` increases with every heartbeat."""

    beat: int
    model: str
    ready: bool
    draining: bool
    running: int  # requests in the engine's batch
    waiting: int  # requests claimed and not yet scheduled
    max_num_seqs: int
    kv_blocks: int
    kv_blocks_used: int
    metrics: MetricsSnapshot | None = None  # only of workers of an earlier release; others write it to `metrics_key`
    batch: int = 0  # running and waiting requests of the batch class
    machine: Machine | None = None
    cpu_seconds: float = 0.0  # CPU time of the process
    disk_low: bool = False  # the disk is almost full, so the replica accepts no new requests
    version: str = ""  # version of the deployment
    spec: ModelSpec | None = None  # what the replica loads
    phase: ReplicaPhase = ReplicaPhase.READY
    reason: str = ""  # why the model could not be loaded
    loaded_bytes: int = 0  # while it is loaded
    total_bytes: int = 0
    load_ms: int = 0  # duration of the last load

    @property
    def deployment_key(self) -> str:
        return deployment_key(self.model, self.version)

    kv_tokens: int = 0  # tokens of the longest sequence that fits into the KV cache
    held_back: int = 0  # part of `waiting` that waits for an upstream's capacity, so that it needs no slot now
    circuit_open: bool = False  # its upstream has failed several times in a row, and not responded since
    tenants_paused: int = 0  # tenants and own credentials whose last requests to its upstream have failed
    digest: int | None = None  # version of the digest of its prefix cache; None: a worker of an earlier release


class WorkerSupport(msgspec.Struct, frozen=True):
    """What the engines of a worker process can compute with, and its machine. Sent with every heartbeat, also without
    a replica."""

    pools: tuple[str, ...]  # names of the worker's pools
    support: ComputeSupport
    host: str = ""  # name of the machine
    started_at: int = 0  # start of the process, in seconds since 1970


Wakeup = tuple[str, int, int]  # request id, execution, attempt
encode = msgspec.msgpack.Encoder().encode
decode_wakeup = msgspec.msgpack.Decoder(Wakeup).decode
decode_job = msgspec.msgpack.Decoder(InferenceJob).decode
decode_usage = msgspec.msgpack.Decoder(ExecutionUsage).decode
decode_event = msgspec.msgpack.Decoder(StreamEvent).decode
decode_events = msgspec.msgpack.Decoder(list[StreamEvent]).decode
decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode
_decode_metrics = msgspec.msgpack.Decoder(MetricsSnapshot).decode
decode_worker_support = msgspec.msgpack.Decoder(WorkerSupport).decode


def read_metrics(payload: bytes | None) -> MetricsSnapshot | None:
    """Return a replica's metrics; None if Valkey has none, or those of another version."""
    try:
        return None if payload is None else _decode_metrics(payload)
    except msgspec.MsgspecError:
        return None
