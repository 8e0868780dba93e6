"""Limits and budgets that apply to a key: its own, and those of its project, its creator and the tenant."""

from __future__ import annotations

from typing import Any

from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import share
from frontend.tenant.budgets.amounts import BudgetAmount
from millrace.apps.policy_results.limiting_factor import LimitingFactor

_SCOPE_LABELS = {
    "key": _lazy("its own"),
    "project": _lazy("its project’s"),
    "tenant": _lazy("the organization’s"),
    "member": _lazy("its creator’s"),
}
_PERIODS = {
    "minute": _lazy("per minute"),
    "day": _lazy("per day"),
    "month": _lazy("per month"),
    "lifetime": _lazy("in total"),
}
NAMES = {
    "requests_per_minute": _lazy("Requests per minute"),
    "input_tokens_per_minute": _lazy("Input tokens per minute"),
    "output_tokens_per_minute": _lazy("Output tokens per minute"),
    "tokens_per_minute": _lazy("Tokens per minute"),
    "requests_per_day": _lazy("Requests per day"),
    "input_tokens_per_day": _lazy("Input tokens per day"),
    "output_tokens_per_day": _lazy("Output tokens per day"),
    "tokens_per_day": _lazy("Tokens per day"),
    "concurrency": _lazy("Concurrent requests"),
    "max_prompt_tokens": _lazy("Prompt tokens per request"),
    "max_output_tokens": _lazy("Output tokens per request"),
    "long_prompt_threshold": _lazy("Long-prompt threshold (tokens)"),
    "long_prompt_concurrency": _lazy("Concurrent long prompts"),
}
_FULL = 10  # per mille; the rest is too small for most requests
_NEAR = 200


def row_of(bound: LimitingFactor) -> dict[str, Any]:
    """Return a limit or budget for templates. `level` is full, near or empty."""
    is_budget = bound.kind == "budget"
    return {
        "bound": bound,
        "label": bound.name if is_budget else NAMES.get(bound.name, bound.name),
        "owner": _SCOPE_LABELS[bound.scope],
        "limit": BudgetAmount.from_units(bound.unit, bound.limit),
        "period": _PERIODS.get(bound.period, ""),
        "left": None if bound.left is None else BudgetAmount.from_units(bound.unit, bound.left),
        "is_budget": is_budget,
        "used": 0 if bound.left is None else bound.limit - bound.left,
        "share": "–" if bound.left is None else share(bound.limit - bound.left, bound.limit),
        "level": _level(bound),
    }


def _level(bound: LimitingFactor) -> str:
    """Return "full" or "near" for a budget. A rate limit that is used up at the moment is normal."""
    if bound.kind != "budget":
        return ""
    return "full" if bound.per_mille <= _FULL else "near" if bound.per_mille <= _NEAR else ""
