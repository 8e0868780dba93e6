"""Requests to the engine and its outputs. Does not import torch: the gateway imports these types too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import astuple

from inference_worker.contract.upstreams import UsageSource

FinishReason = Literal["stop", "length", "cancelled", "content_filter"]  # the last one: only of upstreams
ConstraintType = Literal["json_schema", "json_object", "regex", "grammar", "tools"]
MissReason = Literal["too_short", "first_use", "expired_or_evicted", "prefix_changed"]
MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5  # a temperature below this is 0


def document(**keywords: Any) -> msgspec.Meta:
    """Return an annotation that adds JSON Schema keywords to a type. msgspec does not check them."""
    return msgspec.Meta(extra_json_schema=keywords)


# Types of sampling parameters with their ranges, which `check_sampling` checks and the API document shows.
Temperature = Annotated[float, document(minimum=0, maximum=2.0)]
TopP = Annotated[float, document(minimum=0, maximum=1)]
TopK = Annotated[int, document(minimum=0, maximum=2**31 - 1)]
Seed = Annotated[int, document(minimum=-(2**63), maximum=2**63 - 1)]
MinP = Annotated[float, document(minimum=0, maximum=1)]
Penalty = Annotated[float, document(minimum=-2, maximum=2)]
RepetitionPenalty = Annotated[float, document(minimum=0.1, maximum=10)]
Logprobs = Annotated[int, document(minimum=0, maximum=MAX_LOGPROBS)]
NumAnswers = Annotated[int, document(minimum=1, maximum=128)]


class ServiceClass(IntEnum):
    """The scheduling order across tenants: lower numbers first. BATCH uses only capacity that the other classes
    leave."""

    PRIORITY = 0
    DEFAULT = 1
    FLEX = 2
    BATCH = 3


class RequestRejected(Exception):
    """A request that the engine can never serve; raised at submission.

    `code` is the public error code (`context_length_exceeded`, …). `param` is the request field with the error, if any.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class RequestError:
    """The error with which an accepted request ended. Fields as in `RequestRejected`."""

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None  # seconds
    # What an upstream used before the error. The tenant is not billed for it.
    usage: TokenCounts | None = None
    usage_source: UsageSource = "engine"
    reported_usage: TokenCounts | None = None  # what the upstream reported, if it is more than the request can use


class SamplingParams(msgspec.Struct, frozen=True):
    """Parameters of token selection and of the end of the output, by their names in requests.

    The API document, the checks and the requests to upstreams are derived from these fields.
    """

    max_tokens: Annotated[int, document(minimum=1)] = 16
    temperature: Temperature = 1.0  # 0 is greedy
    top_p: TopP = 1.0  # 0 is greedy
    top_k: TopK = 0  # 0 is off
    seed: Seed | None = None  # None: chosen at random at submission
    stop: tuple[str, ...] = ()  # the output ends before the first of these
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: MinP = 0.0  # excludes tokens below this share of the highest probability
    min_tokens: int = 0  # before them, neither EOS nor a stop id or string ends the output
    presence_penalty: Penalty = 0.0  # subtracted from the logits of the output's tokens
    frequency_penalty: Penalty = 0.0  # the same, times the token's count
    repetition_penalty: RepetitionPenalty = 1.0  # divides (below 0: multiplies) logits of tokens in prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    logprobs: Logprobs | None = None  # number of most likely tokens, in addition to the chosen one; None: off
    prompt_logprobs: Logprobs | None = None  # the same for each prompt token except the first
    n: NumAnswers = 1  # outputs for one prompt; output i has the seed `seed + i`
    include_stop_str_in_output: bool = False  # the stop string, or the text of the stop token
    skip_special_tokens: bool = True  # the text leaves out special tokens

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with other values. The engine uses this, since it does not import msgspec."""
        return msgspec.structs.replace(self, **changes)


SAMPLING_PARAMETERS = SamplingParams.__struct_fields__


@dataclass(frozen=True, slots=True)
class StructuredSpec:
    """The format that an output is constrained to. An unsupported format is rejected at submission.

    `text` depends on `constraint_type`:

    - "json_schema": a JSON schema.
    - "json_object": empty.
    - "regex": a regular expression that the complete output matches.
    - "grammar": a Lark or GBNF grammar.
    - "tools": JSON, `{"tools": [{"name", "parameters", "strict"?}…], "choice": "auto"|"required"|NAME, "parallel"?:
      bool, "answer"?: schema, "format"?: a name in `TOOL_FORMATS`}`.

    Without "format", tool calls are in Hermes' format. With "auto" the output may have no calls. It is then free text
    or matches the schema "answer". Without that schema, text may also precede the first call.
    """

    constraint_type: ConstraintType
    text: str = ""
    param: str = "response_format"  # the request field that a rejection names


@dataclass(frozen=True, slots=True)
class ReasoningSpec:
    """The reasoning that may precede an output's answer. A grammar and stop strings apply only to the answer."""

    format: str  # a name in `REASONING_FORMATS`
    is_open: bool = False  # the prompt has begun the reasoning
    # The request asks for reasoning. If the mark before it is several tokens, an output with a grammar then begins with
    # it. If the mark is one token, the model chooses.
    is_requested: bool = False
    budget: int | None = None  # tokens after which the engine ends the reasoning; None: no limit


@dataclass(frozen=True, slots=True)
class CacheBreakpoint:
    """A mark in a prompt: the tokens before it stay cached for `seconds` after their last use, in pinned whole
    blocks."""

    num_tokens: int
    seconds: int  # 300 or 3600


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with its parameters."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: bytes = b""  # requests share cached prefixes only under the same salt
    arrival: float = 0.0  # seconds of the engine's clock; orders a tenant's equal requests
    tenant: str = ""  # the unit of fair sharing
    weight: float = 1.0  # the tenant's share relative to the others'
    service_class: ServiceClass = ServiceClass.DEFAULT
    priority: int = 0  # among the tenant's requests of one class: lower first
    breakpoints: tuple[CacheBreakpoint, ...] = ()  # in prompt order
    expires_at: float | None = None  # the engine's clock; a request that has not started by then ends with an error
    structured: StructuredSpec | None = None
    reasoning: ReasoningSpec | None = None
    input_lengths: tuple[int, ...] = ()  # for an encoder: lengths of the consecutive inputs in the prompt
    second_starts: tuple[int, ...] = ()  # for a cross-encoder: the position of the second text in each input
    searches: int = 0  # for a cross-encoder: the searches that the request is billed for once it is complete
    paid: Mapping[bytes, int] = field(default_factory=dict)  # hashes of blocks pinned on any replica -> seconds
    speculates: bool = True  # whether drafts of its tokens may be verified, if the engine's configuration allows it
    prediction: tuple[int, ...] = ()  # tokens of the expected output, a source of drafts
    pin_room: int | None = None  # blocks that the tenant may still pin on all replicas; None: no limit


class TokenCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens by class and searches, from the engine to the invoice. PROMPT_CLASSES are the prompt's length."""

    uncached: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    output: int = 0
    answer_hit_input: int = 0  # tokens that a cached answer made unnecessary: of the prompt,
    answer_hit_output: int = 0  # and of the answer
    searches: int = 0  # searches that a cross-encoder answered

    @property
    def prompt(self) -> int:
        return self.uncached + self.cache_read + self.cache_write

    @property
    def cache_write(self) -> int:
        return self.cache_write_5m + self.cache_write_1h

    @property
    def total(self) -> int:
        """Return the tokens of prompt and output."""
        return self.prompt + self.output

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


# The columns of `TokenCounts` in every table. NOTE: append, never reorder: the prices of a usage event have this order.
TOKEN_COLUMNS = TokenCounts.__struct_fields__
PROMPT_CLASSES = ("uncached", "cache_read", "cache_write_5m", "cache_write_1h")
TOKEN_CLASSES = (*PROMPT_CLASSES, "output")  # tokens that an execution used


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The reason why a prompt was not cached completely, determined when the request is first scheduled."""

    miss: MissReason | None = None  # None: all whole blocks were cached
    changed_at: int | None = None  # first token that differs from the previously cached prompt ("prefix_changed")
    unpinned_tokens: int = 0  # before breakpoints, but not pinned because of a limit on pins
    host_tokens: int = 0  # prompt tokens restored from CPU memory


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token and of the most likely tokens at its position, before temperature and
    penalties."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most likely first


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A part of a tool call that an upstream has parsed. The call's first part has its name."""

    number: int  # place of the call in its sequence, from 0
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class RequestOutput:
    """The result of one step for one output sequence of a request.

    `text` contains only the new text. Text that may be the start of a stop string or half a character is withheld. So a
    step may return a token without text.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the sequence; None for EOS
    usage: TokenCounts | None = None  # tokens of all sequences; set with the request's last output
    prompt_usage: TokenCounts | None = None  # tokens of the prompt, once they are known
    scheduled_at: float | None = None  # monotonic seconds of the request's first step
    error: RequestError | None = None  # set instead of finish_reason if the request failed
    index: int = 0  # number of the sequence, below `n`
    # Of token_ids, if requested. Those of tokens that may be the mark before the reasoning are in a later output.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None  # those of all prompt tokens but the first; in the first output
    cache: CacheReport | None = None  # set with the request's last output
    pins: Mapping[bytes, int] = field(default_factory=dict)  # hashes pinned or refreshed by this request -> seconds
    vectors: bytes = b""  # float32, little-endian, in the order of the inputs; of a cross-encoder, a number for each
    reasoning: str = ""  # new text of the reasoning, which comes before `text`
    reasoning_tokens: int = 0  # tokens that are now known to be part of the reasoning
    # Only of upstreams: calls that come after `text`, the signature of the reasoning, and the origin of `usage`.
    calls: list[ToolCallDelta] = field(default_factory=list)
    signature: str = ""
    usage_source: UsageSource = "engine"
    reported_usage: TokenCounts | None = None  # what the upstream reported, if it is more than the request can use
    accepted_drafts: int = 0  # verified draft tokens of all sequences; set with the request's last output
    rejected_drafts: int = 0

    @property
    def finished(self) -> bool:
        """Return whether this is the last output of its sequence."""
        return self.finish_reason is not None or self.error is not None

    @property
    def cached_tokens(self) -> int:
        """Return how many prompt tokens were read from the cache."""
        return self.prompt_usage.cache_read if self.prompt_usage is not None else 0
