"""What the engine is asked, and what it answers. Free of torch: the gateway imports these types too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]
StructuredKind = Literal["json_schema", "json_object", "regex", "grammar", "tools"]
MissReason = Literal["too_short", "first_use", "expired_or_evicted", "prefix_changed"]


class ServiceClass(IntEnum):
    """Who goes before whom, whatever tenant: a lower number first. BATCH only fills what the others leave idle."""

    PRIORITY = 0
    DEFAULT = 1
    FLEX = 2
    BATCH = 3


class RequestRejected(Exception):
    """A request the engine can never serve; raised at submission, before any work.

    `code` is the public error code (`context_length_exceeded`, …), `param` the request field it is about, if any.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class RequestFault:
    """Why a request that had been accepted ended without its answer; fields as in `RequestRejected`."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Ranges are checked where a request enters the platform."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    seed: int | None = None  # None: drawn at submission
    stop: tuple[str, ...] = ()  # the answer ends before the first of these
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0  # tokens less likely than this share of the likeliest one's probability are out
    min_tokens: int = 0  # until then neither EOS nor a stop id is chosen, nor does a stop string end the answer
    presence_penalty: float = 0.0  # subtracted from the logit of each token the answer already has
    frequency_penalty: float = 0.0  # the same, times how often it has it
    repetition_penalty: float = 1.0  # divides (multiplies, below 0) the logits of tokens in prompt or answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    logprobs: int | None = None  # None: none; n: of the chosen token and the n likeliest
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    n: int = 1  # answers to one prompt; answer i has the seed `seed + i`


@dataclass(frozen=True, slots=True)
class StructuredSpec:
    """The form an answer must have. A form that cannot be enforced is refused at submission, by name.

    `text`: a JSON schema ("json_schema"), a regular expression the whole answer matches ("regex"), a Lark or GBNF
    grammar ("grammar"), nothing ("json_object"), or JSON ("tools"): `{"tools": [{"name", "parameters", "strict"?}…],
    "choice": "auto"|"required"|NAME, "parallel"?: bool, "answer"?: schema}`. Calls of tools are
    `<tool_call>{"name":…,"arguments":…}</tool_call>`. With "auto" there may be none: then the answer is free text,
    or follows the schema "answer"; text may also come before the first call, if there is no such schema.
    """

    kind: StructuredKind
    text: str = ""
    param: str = "response_format"  # the request field that a refusal names


@dataclass(frozen=True, slots=True)
class CacheBreakpoint:
    """The prompt up to `num_tokens` is to stay cached for `seconds` after its last use: whole blocks are pinned."""

    num_tokens: int
    seconds: int  # 300 or 3600


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: bytes = b""  # requests share cached prefixes only under the same salt
    arrival: float = 0.0  # seconds of the engine's clock; a tenant's equal requests are served in its order
    tenant: str = ""  # among whom the engine is shared
    weight: float = 1.0  # the tenant's share, in proportion to the others'
    service_class: ServiceClass = ServiceClass.DEFAULT
    priority: int = 0  # among the tenant's own requests of one class: lower first
    breakpoints: tuple[CacheBreakpoint, ...] = ()  # in the order of the prompt
    expires_at: float | None = None  # the engine's clock: a request that has not begun by then is given up
    structured: StructuredSpec | None = None
    input_lengths: tuple[int, ...] = ()  # to be embedded: how the prompt divides into inputs, one after another
    paid: Mapping[bytes, int] = field(default_factory=dict)  # hashes of blocks pinned on any replica -> for how long
    pin_room: int | None = None  # how many more blocks the tenant may have pinned on all replicas; None: no cap


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens by billing class. The four input classes add up to the prompt's length, always."""

    uncached: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    output: int = 0

    @property
    def prompt(self) -> int:
        return self.uncached + self.cache_read + self.cache_write_5m + self.cache_write_1h


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Why a request read no more of its prompt from the cache, fixed when it is first scheduled."""

    miss: MissReason | None = None  # None: all whole blocks were there
    changed_at: int | None = None  # first token at which the prompt leaves the one cached before ("prefix_changed")
    unpinned_tokens: int = 0  # before breakpoints, and not pinned because a cap on pins was reached


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token, and of the likeliest in its place, before temperature and penalties."""

    token_id: int
    logprob: float
    rank: int  # 1: it was the likeliest
    top: tuple[tuple[int, float], ...] = ()  # token id, log-probability; likeliest first


@dataclass(slots=True)
class RequestOutput:
    """What one step brought for one answer of a request.

    `text` is the new text alone; text that may still turn out to be the start of a stop string, or half a UTF-8
    character, is held back until that is known, so a step may bring a token and no text.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for EOS
    usage: TokenUsage | None = None  # of all answers together; set with the request's last output
    prompt_usage: TokenUsage | None = None  # of the prompt alone, once it is known
    scheduled_at: float | None = None  # monotonic seconds of the request's first step
    error: RequestFault | None = None  # set, in place of finish_reason, when the request could not be served
    index: int = 0  # which of the request's `n` answers
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of token_ids, if they were asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt tokens 1 on, with the first output, if asked for
    cache: CacheReport | None = None  # set with the request's last output
    pins: Mapping[bytes, int] = field(default_factory=dict)  # hashes whose time has begun again with this request -> s
    vectors: bytes = b""  # of a request to embed: float32, little-endian, one vector after another in the inputs' order

    @property
    def finished(self) -> bool:
        """Whether this is the last output of its answer."""
        return self.finish_reason is not None or self.error is not None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, read from the cache."""
        return self.prompt_usage.cache_read if self.prompt_usage is not None else 0
