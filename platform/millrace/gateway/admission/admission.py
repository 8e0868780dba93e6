"""May it: limits and money, decided before dispatch and settled after.

`Admission` is the interface the endpoints are written against. `RateLimitAdmission` keeps every limit of a key's
snapshot; `millrace.gateway.admission.budget_admission` adds budgets behind the same calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import redis.asyncio as redis
import structlog

from billing.pricing.pricing import RateCard
from inference_worker.contract.messages import BillingContext
from inference_worker.contract.request import ServiceClass, TokenUsage
from millrace.gateway.admission import rates
from millrace.gateway.admission.limits import ENFORCED, LEASE_MS, LimitCost, LimitStore, TakenLimits, checks_of
from millrace.gateway.core.errors import OVERLOADED, ApiError, invalid
from millrace.gateway.core.limit_status import LimitCheck, LimitStatus
from millrace.gateway.routing.router import Candidate
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot

log = structlog.get_logger(__name__)

RENEW_SECONDS = LEASE_MS / 3000
_RENEWAL_BATCH_SIZE = 500
_NOTHING = LimitCost(0, 0, 0)
_TOKENS_OUT = ("output_tokens_per_minute", "output_tokens_per_day")
_TOKENS_ALL = ("tokens_per_minute", "tokens_per_day")


@dataclass(frozen=True)
class AdmissionRequest:
    """What a request asks for, known exactly before it is admitted."""

    request_id: str
    admitted_at: int  # microseconds since 1970, UTC
    key: ApiKeySnapshot
    name: str  # the model, as asked for
    candidates: list[Candidate]
    prompt_tokens: int
    max_tokens: int | None  # None: the caller did not say
    sequences: int = 1  # answers to generate for the prompt (`n`); 0: it is only embedded
    prompt_param: str = "messages"  # what its callers call the prompt
    writes_5m: bool = False  # it may write to the prefix cache, for 5 minutes
    writes_1h: bool = False
    service_class: ServiceClass = ServiceClass.DEFAULT
    charged: bool = False  # the request itself was counted before its body was read

    @property
    def limit_sets(self) -> list[LimitSetSnapshot]:
        return self.key.limits.of(self.name, self.candidates[0].model.name)


@dataclass(frozen=True)
class AdmissionGrant:
    """What an admitted request may use, and what was set aside for it."""

    max_tokens: int
    price_version: int | None = None
    lease_id: int | None = None
    fencing_token: int | None = None
    reserved_nano: int | None = None
    reserved_tokens: int | None = None
    rate_card: RateCard | None = None  # of `price_version`
    budget_period_ids: Sequence[int] = ()  # that the reservation was taken from


class AdmissionLease(Protocol):
    """An admitted request's place: held until it ends, whichever way."""

    terms: AdmissionGrant

    @property
    def limit_statuses(self) -> Sequence[LimitStatus]:
        """How the limits stood, for the answer's headers."""

    async def close(self, usage: TokenUsage | None) -> None:
        """Release what the ended request did not use. `usage` is None if it never ran. May be called twice."""


class Admission(Protocol):
    async def admit(self, demand: AdmissionRequest) -> AdmissionLease:
        """Admit or refuse.

        Raises:
            ApiError: refused; says by which limit and when to come back.
        """

    async def charge(self, key: ApiKeySnapshot) -> None:
        """Count one request before its body is read and tokenized. It stays counted, whatever becomes of it.

        Raises:
            ApiError: 429, a limit on requests does not allow it.
        """

    async def end(self, billing_context: BillingContext, terms: AdmissionGrant, usage: TokenUsage) -> None:
        """Release what an execution with this usage leaves of its reservation. Call it before its end is sent."""

    async def standing(self, key: ApiKeySnapshot) -> Sequence[LimitStatus]:
        """How the limits stand, for an answer to which nothing was admitted."""

    async def start(self) -> None:
        """Begin to keep the places of admitted requests."""

    async def stop(self) -> None:
        """End that. What is still held comes back by itself."""


class RateLimitLease:
    """What one request holds of its limits."""

    def __init__(
        self,
        admission: RateLimitAdmission,
        terms: AdmissionGrant,
        cost: LimitCost,
        taken: TakenLimits,
        limit_statuses: Sequence[LimitStatus],
    ) -> None:
        self.terms = terms
        self.taken = taken
        self._admission = admission
        self._cost = cost
        self.limit_statuses = limit_statuses
        self._closed = False

    async def close(self, usage: TokenUsage | None) -> None:
        if self._closed:
            return
        self._closed = True
        await self._admission.give_back(self.taken, self._unused(usage))

    def _unused(self, usage: TokenUsage | None) -> LimitCost:
        if usage is None:
            return self._cost
        cached = usage.cache_read * (100 - self._admission.cached_token_limit_percent) // 100
        return LimitCost(0, cached, max(0, self._cost.output - usage.output))


class RateLimitAdmission:
    """Admits what fits its model and every limit on its key's way."""

    def __init__(self, broker: redis.Redis, *, cached_token_limit_percent: int = 0) -> None:
        self._store = LimitStore(broker)
        self.cached_token_limit_percent = cached_token_limit_percent
        self._held: dict[str, TakenLimits] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._renewing = asyncio.create_task(self._keep_places())

    async def stop(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()

    async def admit(self, demand: AdmissionRequest) -> RateLimitLease:
        sets = demand.limit_sets
        terms = AdmissionGrant(_max_tokens(demand, sets))
        cost = LimitCost(1, demand.prompt_tokens, terms.max_tokens * demand.sequences)
        checks = checks_of(demand.key.tenant_id, sets, cost, charged=demand.charged)
        _refuse_what_never_fits(demand.prompt_param, checks)
        taken, limit_statuses = await self._take(demand, checks, cost)
        if taken is None:
            raise _refusal(limit_statuses)
        if taken.places:
            self._held[demand.request_id] = taken
        return RateLimitLease(self, terms, cost, taken, limit_statuses)

    async def charge(self, key: ApiKeySnapshot) -> None:
        windows = [c for c in checks_of(key.tenant_id, key.limits.of(), LimitCost(1, 0, 0)) if c.counts == "requests"]
        if not windows:
            return
        _refuse_what_never_fits("", windows)
        try:
            taken, limit_statuses = await self._store.take(key.tenant_id, "", windows)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1) from exc
        if taken is None:
            raise _refusal(limit_statuses)

    async def standing(self, key: ApiKeySnapshot) -> Sequence[LimitStatus]:
        checks = checks_of(key.tenant_id, key.limits.of(), _NOTHING)
        windows = [check for check in checks if check.group == ENFORCED and check.cost == 0]
        if not windows:
            return []
        try:
            _, limit_statuses = await self._store.take(key.tenant_id, "", windows)
        except redis.RedisError:
            return []  # the answer itself matters more
        return limit_statuses

    async def end(self, billing_context: BillingContext, terms: AdmissionGrant, usage: TokenUsage) -> None:
        return  # rate limits are refunded when the ticket is closed

    async def give_back(self, taken: TakenLimits, unused: LimitCost) -> None:
        """Return what a request did not use, and its places. Lost with the broker: buckets drain, leases end."""
        self._held.pop(taken.request_id, None)
        try:
            await self._store.give_back(taken, unused)
        except redis.RedisError as exc:
            log.warning("limit_release_failed", request_id=taken.request_id, error=str(exc))

    async def _take(
        self, demand: AdmissionRequest, checks: Sequence[LimitCheck], cost: LimitCost
    ) -> tuple[TakenLimits | None, list[LimitStatus]]:
        tenant_id, request_id = demand.key.tenant_id, demand.request_id
        if not checks:
            return TakenLimits(tenant_id, request_id, ()), []
        taking = asyncio.ensure_future(self._store.take(tenant_id, request_id, checks))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:  # the caller has gone; what is taken all the same goes back
            taking.add_done_callback(partial(self._return_unwanted, cost))
            raise
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1) from exc

    def _return_unwanted(
        self, cost: LimitCost, taking: asyncio.Future[tuple[TakenLimits | None, list[LimitStatus]]]
    ) -> None:
        if taking.cancelled() or taking.exception() is not None:
            return
        taken, _ = taking.result()
        if taken is not None:
            self._returning.add(task := asyncio.create_task(self.give_back(taken, cost)))
            task.add_done_callback(self._returning.discard)

    async def _keep_places(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            held = list(self._held.values())
            places = [(key, taken.request_id) for taken in held for key in taken.places]
            try:
                for start in range(0, len(places), _RENEWAL_BATCH_SIZE):
                    await self._store.renew(places[start : start + _RENEWAL_BATCH_SIZE])
                # What ended while we renewed may have been given back first: then its places are taken again now.
                for taken in held:
                    if taken.request_id not in self._held:
                        await self._store.give_back(taken, _NOTHING)
            except redis.RedisError as exc:
                log.warning("lease_renewal_failed", places=len(places), error=str(exc))


def _max_tokens(demand: AdmissionRequest, sets: Iterable[LimitSetSnapshot]) -> int:
    """How long the answer may become.

    Raises:
        ApiError: 400, prompt or answer are longer than the model, or a limit, allows.
    """
    model, prompt, wanted = demand.candidates[0].model, demand.prompt_tokens, demand.max_tokens
    room = model.context_length - prompt
    embeds = wanted == 0  # no answer follows, and its inputs have been measured
    if prompt < 1:
        raise invalid(demand.prompt_param, "The prompt is empty: it must hold at least one token.")
    if room < (wanted or 1) and not embeds:
        asked = f"{prompt} in the prompt" + (f", {wanted} in the completion" if wanted else "")
        raise ApiError(
            "context_length_exceeded",
            f"This model's maximum context length is {model.context_length} tokens. However, you requested "
            f"{prompt + (wanted or 1)} tokens ({asked}). Shorten the prompt or the completion.",
            demand.prompt_param if not wanted or prompt >= model.context_length else "max_tokens",
        )
    enforced = [each for each in sets if not each.dry_run]
    longest = _least(enforced, "max_prompt_tokens")
    if longest is not None and prompt > longest:
        allowed = f"Your limits allow prompts of at most {longest} tokens; this one has {prompt}."
        raise invalid(demand.prompt_param, allowed)
    longest = _least(enforced, "max_output_tokens")
    if wanted is not None:
        if longest is not None and wanted > longest:
            raise invalid("max_tokens", f"Your limits allow answers of at most {longest} tokens.")
        return wanted
    # Nobody asked for a length: what the windows could never give is not reserved.
    bounds = [room, model.default_max_output, longest, _least(enforced, *_TOKENS_OUT)]
    whole = _least(enforced, *_TOKENS_ALL)
    bounds.append(None if whole is None else whole // (demand.sequences or 1) - prompt)
    return max(1, min(bound for bound in bounds if bound is not None))


def _least(sets: Iterable[LimitSetSnapshot], *names: str) -> int | None:
    found = [value for each in sets for name in names if (value := getattr(each, name)) is not None]
    return min(found, default=None)


def _refuse_what_never_fits(prompt_param: str, checks: Iterable[LimitCheck]) -> None:
    """Reject a request that can never fit the limits.

    Raises:
        ApiError: 400, or 429 without a time to come back where the limit lets nothing pass at all.
    """
    params = {"input": prompt_param, "output": "max_tokens", "total": "max_tokens"}
    for check in checks:
        if check.group != ENFORCED or check.cost <= check.limit:
            continue
        if check.limit == 0 or check.counts not in params:
            raise ApiError(
                "rate_limit_exceeded",
                f"Your limits allow nothing here: {rates.describe(check)}.",
                bound=_bound(check, check.limit),
            )
        raise invalid(
            params[check.counts],
            f"This request needs {check.cost} tokens, which your limits can never allow: {rates.describe(check)}.",
        )


def _refusal(limit_statuses: Sequence[LimitStatus]) -> ApiError:
    refusing = [s for s in limit_statuses if s.check.group == ENFORCED and s.wait_ms]
    worst = max(refusing, key=lambda standing: standing.wait_ms)
    used = worst.check.limit - worst.remaining if worst.check.counts in rates.COUNTED else worst.level
    return ApiError(
        "rate_limit_exceeded",
        f"Rate limit reached: {rates.describe(worst.check)}. Used {used}, requested {worst.check.cost}. "
        f"Please try again in {rates.duration(worst.wait_ms)}.",
        retry_after=worst.wait_ms / 1000,
        limit_statuses=limit_statuses,
        bound={**_bound(worst.check, worst.remaining), "reset_ms": worst.wait_ms},
    )


def _bound(check: LimitCheck, left: int) -> dict[str, Any]:
    """Return the limit as a request's record names it."""
    of, told = check.set, {"name": check.name, "limit": check.limit, "left": left, "needed": check.cost}
    return {"kind": "limit", "scope": of.scope, "id": of.id, "model": of.model, **told}
