"""Values of every sampling parameter, derived from its declaration."""

from __future__ import annotations

from typing import Any

from inference_worker.contract.request import SamplingParams
from inference_worker.contract.validation import RANGES

_DEFAULTS = SamplingParams()
_LISTS: dict[str, Any] = {"stop": ("x",), "stop_token_ids": (9,), "logit_bias": ((1, 0.5),)}


def other_value(name: str) -> Any:
    """Return a value in the parameter's range that is not its default."""
    default = getattr(_DEFAULTS, name)
    if name in _LISTS:
        return _LISTS[name]
    if isinstance(default, bool):
        return not default
    value, declared = (default or 0) + 1, RANGES.get(name)
    return value if declared is None or declared.includes(value) else (declared.maximum or 1) / 2


def values_beyond(name: str) -> list[Any]:
    """Return the nearest values that are not in the parameter's range, and NaN for a real number."""
    declared, default = RANGES[name], getattr(_DEFAULTS, name)
    is_real = isinstance(default, float)
    step = 1e-6 if is_real else 1
    beyond = [float("nan")] if is_real else []
    beyond += [] if declared.minimum is None else [declared.minimum - step]
    return beyond + ([] if declared.maximum is None else [declared.maximum + step])


def edges(name: str) -> list[Any]:
    """Return the ends of the parameter's range."""
    declared = RANGES[name]
    return [end for end in (declared.minimum, declared.maximum) if end is not None]
