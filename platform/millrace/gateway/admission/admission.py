"""Admission control: check rate limits and budgets before dispatch, settle afterwards.

`RateLimitAdmission` checks every rate limit of a key's snapshot. `RequestAdmission` in
`millrace.gateway.admission.budget_admission` also reserves budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import cached_property, partial

import msgspec
import redis.asyncio as redis
import structlog

from billing.rates.pricing import RateCard, Rated, price
from billing.rates.reserved_charge import charge_within_reservation
from inference_worker.contract.command_connection import CommandConnection
from inference_worker.contract.messages import BillingContext
from inference_worker.contract.request import TokenCounts
from millrace.gateway.admission import rejections
from millrace.gateway.admission.limits import ENFORCED, LEASE_MS, LimitCost, LimitStore, TakenLimits, make_checks
from millrace.gateway.core import tracing
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import unavailable
from millrace.gateway.core.limit_status import LimitCheck, LimitStatus
from millrace.gateway.core.types import InferenceRequest, Prompt
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot

log = structlog.get_logger(__name__)

RENEW_SECONDS = LEASE_MS / 3000
_RENEWAL_BATCH_SIZE = 500
NO_COST = LimitCost(0, 0, 0)
_TOKENS_OUT = ("output_tokens_per_minute", "output_tokens_per_day")
_TOKENS_ALL = ("tokens_per_minute", "tokens_per_day")


class AdmissionRequest(msgspec.Struct, frozen=True):
    """One prompt of a request, in the tokens of the first of its candidates."""

    request_id: str
    admitted_at: int  # microseconds since 1970, UTC
    key: ApiKeySnapshot
    request: InferenceRequest
    prompt: Prompt
    candidates: list[ServedModel]  # the deployment to run it, then those for fallbacks
    execution: int = 0  # its number among the executions of the prompt

    @property
    def model(self) -> ServedModel:
        return self.candidates[0]

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.num_tokens

    @property
    def sequences(self) -> int:
        """Return the number of completions to generate; 0 for encoders."""
        return 0 if self.prompt.input_lengths else self.request.sampling.n

    @property
    def limit_sets(self) -> list[LimitSetSnapshot]:
        return self.key.limits.of(self.request.model, self.model.name)

    def writes(self, seconds: int) -> bool:
        """Return whether it may write to the prefix cache for this time."""
        return any(breakpoint.seconds == seconds for breakpoint in self.prompt.breakpoints)


class AdmittedRequest(msgspec.Struct, frozen=True, dict=True):
    """What was decided about a request for one execution: the price, the limits and what is reserved."""

    demand: AdmissionRequest
    max_tokens: int
    rate_card: RateCard | None = None  # the pinned prices
    lease_id: int | None = None
    fencing_token: int | None = None
    reserved_nano: int | None = None
    reserved_tokens: int | None = None
    budget_period_ids: Sequence[int] = ()  # IDs of the budget periods that the reservation was reserved from
    has_own_lease: bool = False  # the budget lease is for this execution only
    taken: TakenLimits | None = None
    taken_cost: LimitCost = NO_COST
    limit_statuses: Sequence[LimitStatus] = ()  # states of the rate limits at the admission, for the response's headers
    is_operator_paid: bool = False

    @property
    def price_version(self) -> int | None:
        return None if self.rate_card is None else self.rate_card.version

    def rate(self, usage: TokenCounts) -> Rated:
        """Return the price of its usage, as the settler computes it.

        Raises:
            UnknownPriceError: a component used has no price.
        """
        if self.rate_card is None:
            raise AssertionError("the execution has a price")
        if self.demand.prompt.upstream is None:
            return price(self.rate_card, usage, self.demand.admitted_at)
        return charge_within_reservation(self.rate_card, usage, self.billing_context).rated

    @cached_property
    def billing_context(self) -> BillingContext:
        demand, key = self.demand, self.demand.key
        return BillingContext(
            admitted_at=demand.admitted_at,
            request_id=demand.request_id,
            execution=demand.execution,
            tenant_id=key.tenant_id,
            project_id=key.project_id,
            key_id=key.key_id,
            model=demand.model.name,
            price_version=self.price_version,
            lease_id=self.lease_id,
            fencing_token=self.fencing_token,
            reserved_nano=self.reserved_nano,
            reserved_tokens=self.reserved_tokens,
            traceparent=tracing.current_traceparent(),
            is_operator_paid=self.is_operator_paid,
            end_user=demand.request.end_user,
        )


class RateLimitAdmission:
    """Admission by the context length of the model and the rate limits that apply to the key."""

    def __init__(
        self,
        broker: redis.Redis,
        *,
        commands: CommandConnection | None = None,
        cached_token_limit_percent: int = 0,
    ) -> None:
        """Create an admission. `commands` is a connection to share; by default it has its own."""
        self._store = LimitStore(broker, commands)
        self._cached_token_limit_percent = cached_token_limit_percent
        self._taken: dict[int, TakenLimits] = {}  # by identity: the executions of a request have the same request ID
        self._returning: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to renew the slots of admitted requests."""
        self._renewing = asyncio.create_task(self._renew_slots())

    async def stop(self) -> None:
        """Stop the renewal. Slots that are still taken expire."""
        if self._renewing is not None:
            self._renewing.cancel()
        self._store.close()

    async def admit(self, demand: AdmissionRequest) -> AdmittedRequest:
        """Reserve capacity for a request.

        Raises:
            ApiError: the request is rejected; the error names the limit and when to retry.
        """
        sets = demand.limit_sets
        max_tokens = _max_tokens(demand, sets)
        cost = LimitCost(1, demand.prompt_tokens, max_tokens * demand.sequences)
        checks = make_checks(demand.key.tenant_id, sets, cost, charged=demand.request.analysis.is_charged)
        rejections.require_possible(demand.request.prompt_param, checks)
        taken, limit_statuses = await self._take(demand, checks, cost)
        if taken is None:
            raise rejections.rate_limited(limit_statuses)
        self._taken[id(taken)] = taken
        return AdmittedRequest(demand, max_tokens, taken=taken, taken_cost=cost, limit_statuses=limit_statuses)

    async def reserve_further(self, demand: AdmissionRequest) -> AdmittedRequest:
        """Reserve the maximum cost of a further execution, which may start after the first.

        Its rate limits are checked when it starts (`admit_reserved`).

        Raises:
            ApiError: it does not fit a budget, or cannot run at all.
        """
        return AdmittedRequest(demand, _max_tokens(demand, demand.limit_sets))

    async def return_further(self, reserved: AdmittedRequest) -> bool:
        """Return what was reserved for an execution that does not start.

        Returns:
            False if only a usage event of the execution can release it.
        """
        return True

    async def admit_reserved(self, reserved: AdmittedRequest) -> AdmittedRequest:
        """Admit an execution whose cost is reserved: check its rate limits.

        Raises:
            ApiError: a limit rejects it. Its cost stays reserved.
        """
        limited = await RateLimitAdmission.admit(self, reserved.demand)
        admitted = msgspec.structs.replace(
            reserved, taken=limited.taken, taken_cost=limited.taken_cost, limit_statuses=limited.limit_statuses
        )
        vars(admitted).clear()  # `replace` copies cached properties
        return admitted

    async def admit_side_execution(
        self, demand: AdmissionRequest, max_tokens: int | None = None, *, is_operator_paid: bool
    ) -> AdmittedRequest:
        """Reserve the maximum cost of a side execution, which counts toward no rate limit.

        Args:
            max_tokens: a lower maximum than that of the request.
            is_operator_paid: no budget of the tenant is used.

        Raises:
            ApiError: it does not fit a budget, or cannot run at all.
        """
        highest = _max_tokens(demand, demand.limit_sets)
        max_tokens = highest if max_tokens is None else min(max_tokens, highest)
        return AdmittedRequest(demand, max_tokens, is_operator_paid=is_operator_paid)

    async def charge(self, key: ApiKeySnapshot) -> None:
        """Count one request before its body is read and tokenized. It stays counted even if it is rejected later.

        Raises:
            ApiError: 429, a request limit is reached.
        """
        checks = [c for c in make_checks(key.tenant_id, key.limits.of(), LimitCost(1, 0, 0)) if c.counts == "requests"]
        if not checks:
            return
        rejections.require_possible("", checks)
        try:
            taken, limit_statuses = await self._store.take(key.tenant_id, "", checks)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise unavailable() from exc
        if taken is None:
            raise rejections.rate_limited(limit_statuses)

    async def current_limit_statuses(self, key: ApiKeySnapshot) -> Sequence[LimitStatus]:
        """Return the state of the key's rate limits, for a response without an admission."""
        checks = make_checks(key.tenant_id, key.limits.of(), NO_COST)
        checks = [check for check in checks if check.group == ENFORCED and check.cost == 0]
        if not checks:
            return []
        try:
            _, limit_statuses = await self._store.take(key.tenant_id, "", checks)
        except redis.RedisError:
            return []  # the response is sent without rate-limit headers
        return limit_statuses

    async def end(self, admitted: AdmittedRequest, usage: TokenCounts) -> None:
        """Release the unused part of an execution's reservation. Must be called before the response's end is sent."""

    async def close(self, admitted: AdmittedRequest, usage: TokenCounts | None) -> None:
        """Release the limits that the ended request did not use. `usage` is None if it never ran. Can be repeated."""
        taken = admitted.taken
        if taken is None or self._taken.pop(id(taken), None) is None:
            return
        unused = admitted.taken_cost
        if usage is not None:
            cached = (usage.cache_read + usage.answer_hit_input) * (100 - self._cached_token_limit_percent) // 100
            prompt_tokens = usage.prompt + usage.answer_hit_input
            bound = 0 if admitted.demand.prompt.upstream is None else max(0, unused.input - prompt_tokens)
            unused = LimitCost(0, cached + bound, max(0, unused.output - usage.output))
        await self._release(taken, unused)

    async def _release(self, taken: TakenLimits, unused: LimitCost) -> None:
        """Return a request's unused tokens and its slots.

        If Valkey is unavailable nothing needs to be repeated: buckets drain and slots expire.
        """
        try:
            await self._store.release(taken, unused)
        except redis.RedisError as exc:
            log.warning("limit_release_failed", request_id=taken.request_id, error=str(exc))

    async def _take(
        self, demand: AdmissionRequest, checks: Sequence[LimitCheck], cost: LimitCost
    ) -> tuple[TakenLimits | None, list[LimitStatus]]:
        tenant_id, request_id = demand.key.tenant_id, demand.request_id
        if not checks:
            return TakenLimits(request_id, ()), []
        try:
            return await self._store.take(tenant_id, request_id, checks, partial(self._return_unwanted, cost))
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise unavailable() from exc

    def _return_unwanted(self, cost: LimitCost, taken: TakenLimits) -> None:
        """Release what was taken for a client that has disconnected meanwhile."""
        self._returning.add(task := asyncio.create_task(self._release(taken, cost)))
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
                renewed = {taken.request_id for taken in self._taken.values()}
                for taken in taken_limits:
                    if taken.request_id not in renewed:
                        await self._store.release(taken, NO_COST)
            except redis.RedisError as exc:
                log.warning("lease_renewal_failed", slots=len(slots), error=str(exc))


def _max_tokens(demand: AdmissionRequest, sets: Iterable[LimitSetSnapshot]) -> int:
    """Return the maximum number of output tokens.

    Raises:
        ApiError: 400, the prompt or the completion is longer than the model or a limit allows.
    """
    model, prompt, requested = demand.model, demand.prompt_tokens, demand.request.max_tokens
    room = model.context_length - prompt
    embeds = requested == 0  # there is no completion, and the inputs' lengths are checked
    if prompt < 1:
        raise rejections.empty_prompt(demand.request)
    if room < (requested or 1) and not embeds:
        raise rejections.context_exceeded(demand.request, prompt, model.context_length)
    enforced = [limit_set for limit_set in sets if not limit_set.dry_run]
    maximum = _minimum(enforced, "max_prompt_tokens")
    if maximum is not None and prompt > maximum:
        raise rejections.long_prompt(demand.request, prompt, maximum)
    maximum = _minimum(enforced, "max_output_tokens")
    if requested is not None:
        if maximum is not None and requested > maximum:
            raise rejections.long_output(maximum)
        return requested
    # The request sets no limit: do not reserve more than the rate limits could ever allow.
    bounds = [room, model.default_max_output, maximum, _minimum(enforced, *_TOKENS_OUT)]
    whole = _minimum(enforced, *_TOKENS_ALL)
    bounds.append(None if whole is None else whole // (demand.sequences or 1) - prompt)
    return max(1, min(bound for bound in bounds if bound is not None))


def _minimum(sets: Iterable[LimitSetSnapshot], *names: str) -> int | None:
    found = [value for limit_set in sets for name in names if (value := getattr(limit_set, name)) is not None]
    return min(found, default=None)
