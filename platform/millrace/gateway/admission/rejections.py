"""Rejections by budgets and quotas: the budget, what it has left, and how the request could pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from billing.amounts import NANO_DIGITS, decimal
from billing.budgets.budget_leases import InsufficientBudget, LeasedPeriod
from millrace.gateway.core.errors import OVERLOADED, ApiError

_PERIODS = {"day": "daily ", "month": "monthly ", "lifetime": ""}


def unpriced(model: str) -> ApiError:
    return ApiError("model_not_priced", f"The model {model!r} has no price yet. Contact the operator.", "model")


def rejection(shortages: Sequence[InsufficientBudget], releasable: Mapping[int, int]) -> ApiError:
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
        f" {_amount(period.unit, left)} left, up to {_amount(period.unit, worst.needed)} needed."
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
            f"Active requests reserve {_amount(period.unit, reserved)} and release what they do not use when they end."
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


def _amount(unit: str, amount: int) -> str:
    return f"${decimal(amount, NANO_DIGITS, 2)}" if unit == "money" else f"{amount} {unit}"
