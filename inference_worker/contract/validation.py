"""Limits of sampling parameters. Does not import torch: a gateway checks requests with it before dispatch."""

from __future__ import annotations

import msgspec

from inference_worker.contract.request import RequestRejected, SamplingParams

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300


class ParameterRange(msgspec.Struct, frozen=True):
    """The range of a parameter, read from the JSON Schema keywords of its type."""

    minimum: int | float | None = None
    maximum: int | float | None = None

    def includes(self, value: float) -> bool:
        is_large_enough = self.minimum is None or value >= self.minimum  # NaN is in no range
        return is_large_enough and (self.maximum is None or value <= self.maximum)

    def __str__(self) -> str:
        if self.maximum is None:
            return f"at least {self.minimum}"
        return f"from {self.minimum} to {self.maximum}"


def _read_ranges() -> dict[str, ParameterRange]:
    parameters = msgspec.json.schema_components([SamplingParams])[1]["SamplingParams"]["properties"]
    read = {name: msgspec.convert(each.get("anyOf", [each])[0], ParameterRange) for name, each in parameters.items()}
    return {name: found for name, found in read.items() if found != ParameterRange()}


RANGES = _read_ranges()  # by the name of the parameter; those without a range are left out


def has_penalties(params: SamplingParams) -> bool:
    """Return whether the choice of a token depends on the tokens before it. Other parameters use only the position."""
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Check the range of every parameter.

    Raises:
        RequestRejected: `invalid_value`, naming the parameter.
    """
    for name, declared in RANGES.items():
        value = getattr(params, name)
        if value is not None and not declared.includes(value):
            raise _make_rejection(name, f"must be {declared}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise _make_rejection("min_tokens", f"must be from 0 to {params.max_tokens}")
    _check_stops(params, vocab_size)
    _check_bias(params, vocab_size)


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if len(params.stop) > MAX_STOPS:
        raise _make_rejection("stop", f"takes at most {MAX_STOPS} strings")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in params.stop):
        raise _make_rejection("stop", f"strings must have 1 to {MAX_STOP_CHARACTERS} characters")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _make_rejection("stop_token_ids", f"takes at most {MAX_STOP_TOKEN_IDS} ids")
    if any(not 0 <= token < vocab_size for token in params.stop_token_ids):
        raise _make_rejection("stop_token_ids", f"must be from 0 to {vocab_size - 1}")


def _check_bias(params: SamplingParams, vocab_size: int) -> None:
    bias = params.logit_bias
    if len(bias) > MAX_LOGIT_BIAS:
        raise _make_rejection("logit_bias", f"takes at most {MAX_LOGIT_BIAS} tokens")
    if any(not 0 <= token < vocab_size for token, _ in bias):
        raise _make_rejection("logit_bias", f"is for token ids from 0 to {vocab_size - 1}")
    if len({token for token, _ in bias}) < len(bias):
        raise _make_rejection("logit_bias", "has a token twice")
    if any(not -100 <= value <= 100 for _, value in bias):
        raise _make_rejection("logit_bias", "values must be from -100 to 100")


def _make_rejection(name: str, problem: str) -> RequestRejected:
    return RequestRejected("invalid_value", f"{name} {problem}", name)
