"""Rejections by prices, limits, budgets and quotas: what rejected the request, and how it could pass.

`bound` is the limit or the budget that rejected the request, for the request log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from billing.currencies.amounts import exact_amount
from billing.reservations.budget_leases import InsufficientBudget, LeasedPeriod
from millrace.gateway.admission import rates
from millrace.gateway.admission.limits import ENFORCED
from millrace.gateway.core.errors import CONTEXT_EXCEEDED, OVERLOADED, ApiError, ContextCounts, invalid
from millrace.gateway.core.limit_status import LimitCheck, LimitStatus
from millrace.gateway.core.types import InferenceRequest

_PERIODS = {"day": "daily ", "month": "monthly ", "lifetime": ""}


def reject_unpriced(model: str) -> ApiError:
    return ApiError("model_not_priced", f"The model {model!r} has no price yet. Contact the operator.", "model")


def spend_limit_reached(model: str, seconds: float) -> ApiError:
    text = f"The model {model!r} has reached its provider's daily spend limit. Use another model, or retry tomorrow."
    return ApiError("upstream_limit_reached", text, "model", retry_after=seconds)


def empty_prompt(request: InferenceRequest) -> ApiError:
    return invalid(request.prompt_param, "The prompt is empty. It must have at least one token.")


def context_exceeded(request: InferenceRequest, prompt: int, context_length: int) -> ApiError:
    """Return the error of a prompt, or else of an output limit, that is too large for the context."""
    requested = request.max_tokens or 1
    counts = ContextCounts(prompt, requested, context_length)
    if request.max_tokens and prompt < context_length:
        message = (
            f"max_tokens is too large: {requested}. The prompt has {prompt} tokens and this model's context"
            f" {context_length}, so the completion can have at most {context_length - prompt}."
        )
        return ApiError(CONTEXT_EXCEEDED, message, "max_tokens", counts=counts)
    message = (
        f"This model's maximum context length is {context_length} tokens. However, you requested {prompt + requested}"
        f" tokens ({prompt} in the prompt, {requested} in the completion). Shorten the prompt."
    )
    return ApiError(CONTEXT_EXCEEDED, message, request.prompt_param, counts=counts)


def long_prompt(request: InferenceRequest, prompt: int, maximum: int) -> ApiError:
    text = f"Your limits allow prompts of at most {maximum} tokens; this prompt has {prompt}."
    return invalid(request.prompt_param, text)


def long_output(maximum: int) -> ApiError:
    return invalid("max_tokens", f"Your limits allow at most {maximum} output tokens. Reduce max_tokens.")


def require_possible(prompt_param: str, checks: Iterable[LimitCheck]) -> None:
    """Check that the request can fit the limits at all.

    Raises:
        ApiError: 400, the request is too large; 429 without a retry time, a limit is zero.
    """
    params = {"input": prompt_param, "output": "max_tokens", "total": "max_tokens"}
    for check in checks:
        if check.group != ENFORCED or check.cost <= check.limit:
            continue
        limit = rates.describe(check)
        if check.limit == 0 or check.counts not in params:
            bound = _limit_bound(check, check.limit)
            raise ApiError("rate_limit_exceeded", f"Your limit is zero: {limit}.", bound=bound)
        text = f"This request needs {check.cost} tokens, which your limits can never allow: {limit}."
        raise invalid(params[check.counts], text)


def rate_limited(limit_statuses: Sequence[LimitStatus]) -> ApiError:
    """Build the rejection by the limit with the longest wait."""
    refusing = [status for status in limit_statuses if status.check.group == ENFORCED and status.wait_ms]
    worst = max(refusing, key=lambda status: status.wait_ms)
    used = worst.check.limit - worst.remaining if worst.check.counts in rates.COUNTED else worst.level
    return ApiError(
        "rate_limit_exceeded",
        f"Rate limit reached: {rates.describe(worst.check)}. Used {used}, requested {worst.check.cost}. "
        f"Please try again in {rates.duration(worst.wait_ms)}.",
        retry_after=worst.wait_ms / 1000,
        limit_statuses=limit_statuses,
        bound={**_limit_bound(worst.check, worst.remaining), "reset_ms": worst.wait_ms},
    )


def _limit_bound(check: LimitCheck, left: int) -> dict[str, Any]:
    limit_set, fields = check.set, {"name": check.name, "limit": check.limit, "left": left, "needed": check.cost}
    return {"kind": "limit", "scope": limit_set.scope, "id": limit_set.id, "model": limit_set.model, **fields}


def over_budget(shortages: Sequence[InsufficientBudget], releasable: Mapping[int, int]) -> ApiError:
    """Build the rejection of a request that does not fit these budget periods.

    Args:
        releasable: per period ID, what active requests have reserved and may not use.
    """
    final = [shortage for shortage in shortages if not shortage.recallable]
    if not final:
        now = datetime.now(UTC)
        seconds = max((shortage.until - now).total_seconds() for shortage in shortages if shortage.until is not None)
        text = "Part of your budget is reserved by a server that does not respond. Retry later."
        return ApiError(OVERLOADED, text, retry_after=max(1.0, seconds))
    worst = final[0]
    period, left = worst.budget_period, max(0, worst.room)
    reserved = releasable.get(period.id, 0)
    may_settle = worst.room + reserved >= worst.needed
    code = "budget_exceeded" if period.unit == "money" else "quota_exceeded"
    budget_type = "budget" if period.unit == "money" else f"{period.unit} quota"
    return ApiError(
        code,
        f"The {_PERIODS[period.period]}{budget_type} {period.name!r} does not allow this request:"
        f" {_amount(period, left)} left, up to {_amount(period, worst.needed)} needed."
        f" {_advice(period, reserved if may_settle else 0)}",
        retry_after=1 if may_settle else _seconds_until(period.ends),
        bound={
            "kind": "budget",
            "id": period.budget_id,
            "name": period.name,
            "unit": period.unit,
            "period": period.period,
            "left": left,
            "needed": worst.needed,
            "resets_at": period.ends and period.ends.astimezone(UTC).isoformat(),
        },
    )


def _advice(period: LeasedPeriod, reserved: int) -> str:
    """Return advice on how the request could pass. `reserved`: what active requests may release, if it is enough."""
    texts = []
    if reserved:
        texts.append(
            f"Active requests reserve {_amount(period, reserved)} and release what they do not use when they end."
        )
    if period.unit != "requests":
        texts.append("A smaller request needs less.")
    if period.ends:
        texts.append(f"The {'quota' if period.unit != 'money' else 'budget'} resets at {_time(period.ends)}.")
    return " ".join(texts) or "It does not reset. Raise the quota."


def _seconds_until(time: datetime | None) -> float | None:
    return None if time is None else (time - datetime.now(UTC)).total_seconds()


def _time(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _amount(period: LeasedPeriod, amount: int) -> str:
    return exact_amount(amount, period.currency) if period.unit == "money" else f"{amount} {period.unit}"
