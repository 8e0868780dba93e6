"""Rejections by budgets and quotas: which one, what it has left, and what would let the request pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from billing.amounts import decimal
from billing.budgets.budget_leases import InsufficientBudget, LeasedPeriod
from millrace.gateway.core.errors import OVERLOADED, ApiError

_PERIODS = {"day": "daily ", "month": "monthly ", "lifetime": ""}


def unpriced(model: str) -> ApiError:
    return ApiError("model_not_priced", f"The model {model!r} has no price yet; please contact the operator.", "model")


def refusal(shortages: Sequence[InsufficientBudget], releasable: Mapping[int, int]) -> ApiError:
    """Build the rejection of a request that these budget periods have no room for.

    Args:
        releasable: what running requests reserve of each budget period and may not use.
    """
    final = [shortage for shortage in shortages if not shortage.recallable]
    if not final:
        now = datetime.now(UTC)
        seconds = max((each.until - now).total_seconds() for each in shortages if each.until is not None)
        text = "Part of your budget is held by a server that does not answer; please try again later."
        return ApiError(OVERLOADED, text, retry_after=max(1.0, seconds))
    worst = final[0]
    period, left = worst.budget_period, max(0, worst.room)
    reserved = releasable.get(period.id, 0)
    may_settle = worst.room + reserved >= worst.needed
    code = "budget_exceeded" if period.unit == "money" else "quota_exceeded"
    kind = "budget" if period.unit == "money" else f"{period.unit} quota"
    return ApiError(
        code,
        f"The {_PERIODS[period.period]}{kind} {period.name!r} does not allow this request: {_amount(period.unit, left)}"
        f" left, up to {_amount(period.unit, worst.needed)} needed. {_advice(period, reserved if may_settle else 0)}",
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
    """Describe what would let the request pass. `reserved`: what running requests reserve, if it would be enough."""
    texts = []
    if reserved:
        texts.append(
            f"Running requests reserve {_amount(period.unit, reserved)} and release what they do not use when they end."
        )
    if period.unit != "requests":
        texts.append("A smaller request needs less.")
    if period.ends:
        texts.append(f"The {'quota' if period.unit != 'money' else 'budget'} resets at {_time(period.ends)}.")
    return " ".join(texts) or "It does not reset. Raise the quota."


def _seconds_until(at: datetime | None) -> float | None:
    return None if at is None else (at - datetime.now(UTC)).total_seconds()


def _time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _amount(unit: str, amount: int) -> str:
    return f"${decimal(amount, 9, 2)}" if unit == "money" else f"{amount} {unit}"
