"""May it: limits and money, decided before dispatch and settled after.

`Admission` is the interface the endpoints are written against. `OpenAdmission` enforces what a snapshot alone can
decide (longest prompt, longest answer); request, token and concurrency buckets and budget slices come behind the same
calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from inference_worker.engine.request import TokenUsage
from millrace.gateway.errors import ApiError, invalid
from millrace.gateway.routing import Candidate
from tenants.snapshot import KeySnapshot


@dataclass(frozen=True)
class Demand:
    """What a request asks for, known exactly before it is admitted."""

    request_id: str
    admitted_at: int  # microseconds since 1970, UTC
    key: KeySnapshot
    candidates: list[Candidate]
    prompt_tokens: int
    max_tokens: int | None  # None: the caller did not say
    sequences: int = 1  # answers to generate for the prompt (`n`)


@dataclass(frozen=True)
class Terms:
    """What an admitted request may use, and what was set aside for it."""

    max_tokens: int
    price_version: int | None = None
    slice_id: int | None = None
    fence: int | None = None
    hold: int | None = None  # nano-USD


class Ticket(Protocol):
    """An admitted request's place: held until it ends, whichever way."""

    terms: Terms

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Rate headers for the answer."""

    async def close(self, usage: TokenUsage | None) -> None:
        """The request has ended: give back what it did not use. None: it never ran. May be called twice."""


class Admission(Protocol):
    async def admit(self, demand: Demand) -> Ticket:
        """Admit or refuse.

        Raises:
            ApiError: refused; says by which limit and when to come back.
        """


class OpenTicket:
    """The ticket of an admission that counts nothing."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    def headers(self) -> list[tuple[bytes, bytes]]:
        return []

    async def close(self, usage: TokenUsage | None) -> None:
        """Nothing was taken, nothing goes back."""


class OpenAdmission:
    """Admits every request that fits its model and its key's longest prompt and answer."""

    async def admit(self, demand: Demand) -> Ticket:
        model, limits = demand.candidates[0].model, demand.key.limits
        room = model.context_length - demand.prompt_tokens
        if demand.prompt_tokens < 1:
            raise invalid("prompt", "The prompt is empty: it must hold at least one token.")
        wanted = demand.max_tokens
        if room < (wanted or 1):
            asked = f"{demand.prompt_tokens} in the prompt" + (f", {wanted} in the completion" if wanted else "")
            raise ApiError(
                "context_length_exceeded",
                f"This model's maximum context length is {model.context_length} tokens. However, you requested "
                f"{demand.prompt_tokens + (wanted or 1)} tokens ({asked}). Shorten the prompt or the completion.",
                "messages" if not wanted or demand.prompt_tokens >= model.context_length else "max_tokens",
            )
        if limits.max_prompt_tokens is not None and demand.prompt_tokens > limits.max_prompt_tokens:
            raise invalid("messages", f"This API key allows prompts of at most {limits.max_prompt_tokens} tokens.")
        if wanted and limits.max_output_tokens is not None and wanted > limits.max_output_tokens:
            raise invalid("max_tokens", f"This API key allows answers of at most {limits.max_output_tokens} tokens.")
        default = min(room, model.default_max_output, limits.max_output_tokens or room)
        return OpenTicket(Terms(wanted or default, demand.candidates[0].price_version))
