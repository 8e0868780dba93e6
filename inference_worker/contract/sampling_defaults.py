"""Sampling parameters of requests that do not set them: those of the checkpoint, or of the deployment's option."""

from __future__ import annotations

from collections.abc import Container, Mapping

from inference_worker.contract.output_formats import AUTO, NONE
from inference_worker.contract.request import SamplingParams
from inference_worker.contract.validation import RANGES

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_CHARACTERS = 200  # characters of the option
SamplingDefaults = tuple[tuple[str, float], ...]  # names and values, in the order of NAMES


def parse_sampling_defaults(text: str) -> SamplingDefaults | None:
    """Parse the option of a deployment: `name=value`, comma-separated, or "none", or "auto".

    Returns:
        The values; None for those of the checkpoint ("auto").

    Raises:
        ValueError: a name is unknown or twice, or a value is invalid.
    """
    if text in (AUTO, NONE):
        return None if text == AUTO else ()
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in NAMES or name in values:
            names = ", ".join(NAMES)
            raise ValueError(f"{part.strip()[:100]!r}: want auto, none, or name=value with each of {names} once")
        try:
            value = int(number) if name == "top_k" else float(number)
        except ValueError:
            raise ValueError(f"{name}: {number[:100]!r} is not a number") from None
        if not RANGES[name].includes(value):
            raise ValueError(f"{name} must be {RANGES[name]}")
        values[name] = value
    return _in_order(values)


def format_sampling_defaults(defaults: SamplingDefaults) -> str:
    """Return the option with these values. `parse_sampling_defaults` reverses it."""
    return ",".join(f"{name}={value}" for name, value in defaults) or NONE


def valid_sampling_defaults(values: Mapping[str, object]) -> SamplingDefaults:
    """Return the defaults among the values of a checkpoint. Those that no request may have are left out."""
    found: dict[str, float] = {}
    for name in NAMES:
        value = values.get(name)
        if name == "top_k" and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int if name == "top_k" else (int, float)) and not isinstance(value, bool):
            value = 0 if name == "top_k" and value == -1 else value
            if RANGES[name].includes(value):
                found[name] = value
    return _in_order(found)


def find_unset(params: SamplingParams, given: Container[str]) -> tuple[str, ...]:
    """Return the parameters for which a request takes the deployment's defaults.

    Args:
        given: the parameters that the request sets. Greedy and seeded requests take no defaults, so that their answers
            do not depend on them.
    """
    if params.is_greedy or params.seed is not None:
        return ()
    return tuple(name for name in NAMES if name not in given)


def _in_order(values: Mapping[str, float]) -> SamplingDefaults:
    return tuple((name, values[name]) for name in NAMES if name in values)
