"""Refusals for want of money: by which budget, how much was left, when that changes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from billing.amounts import decimal
from billing.slices import Shortage
from millrace.gateway.errors import OVERLOADED, ApiError

_PERIODS = {"day": "daily ", "month": "monthly ", "lifetime": ""}


def unpriced(model: str) -> ApiError:
    return ApiError("model_not_priced", f"The model {model!r} has no price yet; please contact the operator.", "model")


def refusal(shortages: Sequence[Shortage]) -> ApiError:
    """Why these windows do not let the request pass. Where something is only held by a gateway that does not answer, it
    may pass later."""
    final = [shortage for shortage in shortages if not shortage.recallable]
    if not final:
        now = datetime.now(UTC)
        seconds = max((each.until - now).total_seconds() for each in shortages if each.until is not None)
        text = "Part of your budget is held by a server that does not answer; please try again later."
        return ApiError(OVERLOADED, text, retry_after=max(1.0, seconds))
    worst = final[0]
    window, left = worst.window, max(0, worst.room)
    resets = f" It resets at {window.ends.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}." if window.ends else ""
    code = "budget_exceeded" if window.unit == "money" else "quota_exceeded"
    kind = "budget" if window.unit == "money" else f"{window.unit} quota"
    return ApiError(
        code,
        f"The {_PERIODS[window.period]}{kind} {window.name!r} does not allow this request: {_amount(window.unit, left)}"
        f" left, up to {_amount(window.unit, worst.needed)} needed.{resets}",
        bound={
            "kind": "budget",
            "id": window.budget_id,
            "name": window.name,
            "unit": window.unit,
            "period": window.period,
            "left": left,
            "needed": worst.needed,
            "resets_at": window.ends and window.ends.astimezone(UTC).isoformat(),
        },
    )


def _amount(unit: str, amount: int) -> str:
    return f"${decimal(amount, 9, 2)}" if unit == "money" else f"{amount} {unit}"
