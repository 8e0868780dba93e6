"""The reasoning parameters of all dialects: efforts as budgets, and checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import ReasoningOptions
from millrace.gateway.protocols.openai.parameters import MAX_TOKENS, within

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
BUDGETS: Mapping[str, int] = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192}  # tokens; other efforts: no limit


def effort_options(effort: Effort | None, name: str) -> ReasoningOptions:
    """Return the options for an effort, which the dialect calls `name`."""
    if effort is None:
        return ReasoningOptions()
    names = () if effort == "none" else (name,)
    return ReasoningOptions(is_enabled=effort != "none", budget=BUDGETS.get(effort), effort=effort, names=names)


def check_budget(budget: int, max_tokens: int | None, name: str, *, minimum: int = 0) -> None:
    """Check a budget in tokens, which the dialect calls `name`.

    Raises:
        ApiError: 400, the budget is out of range, or leaves no tokens for the answer.
    """
    within(name, budget, minimum, MAX_TOKENS)
    if max_tokens is not None and budget >= max_tokens:
        raise invalid(name, f"{name} must be less than the maximum number of output tokens, {max_tokens}.")
