"""What the engine is asked, and what it answers. Free of torch: the gateway imports these types too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]


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


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. `arrival` is any clock's seconds: requests are served in its order."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: bytes = b""  # requests share cached prefixes only under the same salt
    arrival: float = 0.0


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


@dataclass(slots=True)
class RequestOutput:
    """What one step brought for one request.

    `text` is the new text alone; text that may still turn out to be the start of a stop string, or half a UTF-8
    character, is held back until that is known, so a step may bring a token and no text.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for EOS
    usage: TokenUsage | None = None  # set when finished
    cached_tokens: int = 0  # of the prompt, read from the cache
    scheduled_at: float | None = None  # monotonic seconds of the request's first step
    error: RequestFault | None = None  # set, in place of finish_reason, when the request could not be served

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None or self.error is not None
