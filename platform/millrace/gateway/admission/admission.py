"""Admission control: check rate limits and budgets before dispatch, settle afterwards.

`Admission` is the interface that the gateway uses. `RateLimitAdmission` checks every rate limit of a key's snapshot.
`millrace.gateway.admission.budget_admission` adds budgets behind the same interface.
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
from millrace.gateway.admission.limits import ENFORCED, LEASE_MS, LimitCost, LimitStore, TakenLimits, make_checks
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
    """What a request needs, known exactly before it is admitted."""

    request_id: str
    admitted_at: int  # microseconds since 1970, UTC
    key: ApiKeySnapshot
    name: str  # the requested model name
    candidates: list[Candidate]
    prompt_tokens: int
    max_tokens: int | None  # None: the request does not set a limit
    sequences: int = 1  # completions to generate for the prompt (`n`); 0: an embedding
    prompt_param: str = "messages"  # the dialect's parameter name for the prompt
    writes_5m: bool = False  # it may write to the prefix cache for 5 minutes
    writes_1h: bool = False
    service_class: ServiceClass = ServiceClass.DEFAULT
    charged: bool = False  # the request was counted before its body was read

    @property
    def limit_sets(self) -> list[LimitSetSnapshot]:
        return self.key.limits.of(self.name, self.candidates[0].model.name)


@dataclass(frozen=True)
class AdmissionGrant:
    """What an admitted request may use, and what was reserved for it."""

    max_tokens: int
    price_version: int | None = None
    lease_id: int | None = None
    fencing_token: int | None = None
    reserved_nano: int | None = None
    reserved_tokens: int | None = None
    rate_card: RateCard | None = None  # of `price_version`
    budget_period_ids: Sequence[int] = ()  # IDs of the budget periods that the reservation was reserved from


class AdmissionLease(Protocol):
    """The capacity of an admitted request, reserved until the request ends."""

    grant: AdmissionGrant

    @property
    def limit_statuses(self) -> Sequence[LimitStatus]:
        """Return the state of the rate limits at the admission, for the response's headers."""

    async def close(self, usage: TokenUsage | None) -> None:
        """Release what the ended request did not use. `usage` is None if it never ran. Can be called twice."""


class Admission(Protocol):
    async def admit(self, demand: AdmissionRequest) -> AdmissionLease:
        """Reserve capacity for a request.

        Raises:
            ApiError: the request is rejected; the error names the limit and when to retry.
        """

    async def charge(self, key: ApiKeySnapshot) -> None:
        """Count one request before its body is read and tokenized. It stays counted even if it is rejected later.

        Raises:
            ApiError: 429, a request limit is reached.
        """

    async def end(self, billing_context: BillingContext, grant: AdmissionGrant, usage: TokenUsage) -> None:
        """Release the unused part of an execution's reservation. Must be called before the response's end is sent."""

    async def current_limit_statuses(self, key: ApiKeySnapshot) -> Sequence[LimitStatus]:
        """Return the state of the key's rate limits, for a response without an admission."""

    async def start(self) -> None:
        """Start to renew the slots of admitted requests."""

    async def stop(self) -> None:
        """Stop the renewal. Slots that are still taken expire."""


class RateLimitLease:
    """The rate-limit capacity of one admitted request."""

    def __init__(
        self,
        admission: RateLimitAdmission,
        grant: AdmissionGrant,
        cost: LimitCost,
        taken: TakenLimits,
        limit_statuses: Sequence[LimitStatus],
    ) -> None:
        self.grant = grant
        self.taken = taken
        self._admission = admission
        self._cost = cost
        self.limit_statuses = limit_statuses
        self._closed = False

    async def close(self, usage: TokenUsage | None) -> None:
        if self._closed:
            return
        self._closed = True
        await self._admission.release(self.taken, self._unused(usage))

    def _unused(self, usage: TokenUsage | None) -> LimitCost:
        if usage is None:
            return self._cost
        cached = usage.cache_read * (100 - self._admission.cached_token_limit_percent) // 100
        return LimitCost(0, cached, max(0, self._cost.output - usage.output))


class RateLimitAdmission:
    """Admission by the context length of the model and the rate limits that apply to the key."""

    def __init__(self, broker: redis.Redis, *, cached_token_limit_percent: int = 0) -> None:
        self._store = LimitStore(broker)
        self.cached_token_limit_percent = cached_token_limit_percent
        self._taken: dict[str, TakenLimits] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._renewing = asyncio.create_task(self._renew_slots())

    async def stop(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        self._store.close()

    async def admit(self, demand: AdmissionRequest) -> RateLimitLease:
        sets = demand.limit_sets
        grant = AdmissionGrant(_max_tokens(demand, sets))
        cost = LimitCost(1, demand.prompt_tokens, grant.max_tokens * demand.sequences)
        checks = make_checks(demand.key.tenant_id, sets, cost, charged=demand.charged)
        _reject_impossible(demand.prompt_param, checks)
        taken, limit_statuses = await self._take(demand, checks, cost)
        if taken is None:
            raise _rejection(limit_statuses)
        if taken.slots:
            self._taken[demand.request_id] = taken
        return RateLimitLease(self, grant, cost, taken, limit_statuses)

    async def charge(self, key: ApiKeySnapshot) -> None:
        checks = [c for c in make_checks(key.tenant_id, key.limits.of(), LimitCost(1, 0, 0)) if c.counts == "requests"]
        if not checks:
            return
        _reject_impossible("", checks)
        try:
            taken, limit_statuses = await self._store.take(key.tenant_id, "", checks)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise ApiError(OVERLOADED, "The service is temporarily unavailable. Retry later.", retry_after=1) from exc
        if taken is None:
            raise _rejection(limit_statuses)

    async def current_limit_statuses(self, key: ApiKeySnapshot) -> Sequence[LimitStatus]:
        checks = make_checks(key.tenant_id, key.limits.of(), _NOTHING)
        checks = [check for check in checks if check.group == ENFORCED and check.cost == 0]
        if not checks:
            return []
        try:
            _, limit_statuses = await self._store.take(key.tenant_id, "", checks)
        except redis.RedisError:
            return []  # the response is sent without rate-limit headers
        return limit_statuses

    async def end(self, billing_context: BillingContext, grant: AdmissionGrant, usage: TokenUsage) -> None:
        return  # rate limits are refunded when the lease is closed

    async def release(self, taken: TakenLimits, unused: LimitCost) -> None:
        """Return a request's unused tokens and its slots.

        If Valkey is unavailable nothing needs to be repeated: buckets drain and slots expire.
        """
        self._taken.pop(taken.request_id, None)
        try:
            await self._store.release(taken, unused)
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
        except asyncio.CancelledError:  # the client disconnected; return the capacity if it is taken nevertheless
            taking.add_done_callback(partial(self._return_unwanted, cost))
            raise
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise ApiError(OVERLOADED, "The service is temporarily unavailable. Retry later.", retry_after=1) from exc

    def _return_unwanted(
        self, cost: LimitCost, taking: asyncio.Future[tuple[TakenLimits | None, list[LimitStatus]]]
    ) -> None:
        if taking.cancelled() or taking.exception() is not None:
            return
        taken, _ = taking.result()
        if taken is not None:
            self._returning.add(task := asyncio.create_task(self.release(taken, cost)))
            task.add_done_callback(self._returning.discard)

    async def _renew_slots(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            taken_limits = list(self._taken.values())
            slots = [(key, taken.request_id) for taken in taken_limits for key in taken.slots]
            try:
                for start in range(0, len(slots), _RENEWAL_BATCH_SIZE):
                    await self._store.renew(slots[start : start + _RENEWAL_BATCH_SIZE])
                # A request that ended meanwhile may have released its slots before they were renewed. Release again.
                for taken in taken_limits:
                    if taken.request_id not in self._taken:
                        await self._store.release(taken, _NOTHING)
            except redis.RedisError as exc:
                log.warning("lease_renewal_failed", slots=len(slots), error=str(exc))


def _max_tokens(demand: AdmissionRequest, sets: Iterable[LimitSetSnapshot]) -> int:
    """Return the maximum number of output tokens.

    Raises:
        ApiError: 400, the prompt or the completion is longer than the model or a limit allows.
    """
    model, prompt, requested = demand.candidates[0].model, demand.prompt_tokens, demand.max_tokens
    room = model.context_length - prompt
    embeds = requested == 0  # there is no completion, and the inputs' lengths are checked
    if prompt < 1:
        raise invalid(demand.prompt_param, "The prompt is empty. It must have at least one token.")
    if room < (requested or 1) and not embeds:
        parts = f"{prompt} in the prompt" + (f", {requested} in the completion" if requested else "")
        raise ApiError(
            "context_length_exceeded",
            f"This model's maximum context length is {model.context_length} tokens. However, you requested "
            f"{prompt + (requested or 1)} tokens ({parts}). Shorten the prompt or the completion.",
            demand.prompt_param if not requested or prompt >= model.context_length else "max_tokens",
        )
    enforced = [limit_set for limit_set in sets if not limit_set.dry_run]
    maximum = _minimum(enforced, "max_prompt_tokens")
    if maximum is not None and prompt > maximum:
        allowed = f"Your limits allow prompts of at most {maximum} tokens; this prompt has {prompt}."
        raise invalid(demand.prompt_param, allowed)
    maximum = _minimum(enforced, "max_output_tokens")
    if requested is not None:
        if maximum is not None and requested > maximum:
            raise invalid("max_tokens", f"Your limits allow at most {maximum} output tokens. Reduce max_tokens.")
        return requested
    # The request sets no limit: do not reserve more than the rate limits could ever allow.
    bounds = [room, model.default_max_output, maximum, _minimum(enforced, *_TOKENS_OUT)]
    whole = _minimum(enforced, *_TOKENS_ALL)
    bounds.append(None if whole is None else whole // (demand.sequences or 1) - prompt)
    return max(1, min(bound for bound in bounds if bound is not None))


def _minimum(sets: Iterable[LimitSetSnapshot], *names: str) -> int | None:
    found = [value for limit_set in sets for name in names if (value := getattr(limit_set, name)) is not None]
    return min(found, default=None)


def _reject_impossible(prompt_param: str, checks: Iterable[LimitCheck]) -> None:
    """Check that the request can fit the limits at all.

    Raises:
        ApiError: 400, the request is too large; 429 without a retry time, a limit is zero.
    """
    params = {"input": prompt_param, "output": "max_tokens", "total": "max_tokens"}
    for check in checks:
        if check.group != ENFORCED or check.cost <= check.limit:
            continue
        if check.limit == 0 or check.counts not in params:
            raise ApiError(
                "rate_limit_exceeded",
                f"Your limit is zero: {rates.describe(check)}.",
                bound=_bound(check, check.limit),
            )
        raise invalid(
            params[check.counts],
            f"This request needs {check.cost} tokens, which your limits can never allow: {rates.describe(check)}.",
        )


def _rejection(limit_statuses: Sequence[LimitStatus]) -> ApiError:
    refusing = [status for status in limit_statuses if status.check.group == ENFORCED and status.wait_ms]
    worst = max(refusing, key=lambda status: status.wait_ms)
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
    """Return the limit's fields for the request log."""
    limit_set, fields = check.set, {"name": check.name, "limit": check.limit, "left": left, "needed": check.cost}
    return {"kind": "limit", "scope": limit_set.scope, "id": limit_set.id, "model": limit_set.model, **fields}
