"""Limits of sampling parameters. Does not import torch: a gateway checks requests with it before dispatch."""

from __future__ import annotations

from inference_worker.contract.request import RequestRejected, SamplingParams

MAX_TEMPERATURE = 2.0
MAX_TOP_K = 2**31 - 1
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_ANSWERS = 128


def has_penalties(params: SamplingParams) -> bool:
    """Return whether the choice of a token depends on the tokens before it. Other parameters use only the position."""
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Check the range of every parameter.

    Raises:
        RequestRejected: `invalid_value`, naming the parameter.
    """
    if params.max_tokens < 1:
        raise _invalid("max_tokens", "must be at least 1")
    _within("min_tokens", params.min_tokens, 0, params.max_tokens)
    _within("temperature", params.temperature, 0, MAX_TEMPERATURE)
    if not 0 < params.top_p <= 1:  # NaN is in no range
        raise _invalid("top_p", "must be above 0 and at most 1")
    _within("top_k", params.top_k, 0, MAX_TOP_K)
    _within("min_p", params.min_p, 0, 1)
    _within("presence_penalty", params.presence_penalty, -2, 2)
    _within("frequency_penalty", params.frequency_penalty, -2, 2)
    _within("repetition_penalty", params.repetition_penalty, 0.1, 10)
    _within("n", params.n, 1, MAX_ANSWERS)
    if params.seed is not None:
        _within("seed", params.seed, -(2**63), 2**63 - 1)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None:
            _within(name, count, 0, MAX_LOGPROBS)
    _check_stops(params, vocab_size)
    _check_bias(params, vocab_size)


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if len(params.stop) > MAX_STOPS:
        raise _invalid("stop", f"takes at most {MAX_STOPS} strings")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in params.stop):
        raise _invalid("stop", f"strings must have 1 to {MAX_STOP_CHARACTERS} characters")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid("stop_token_ids", f"takes at most {MAX_STOP_TOKEN_IDS} ids")
    if any(not 0 <= token < vocab_size for token in params.stop_token_ids):
        raise _invalid("stop_token_ids", f"must be from 0 to {vocab_size - 1}")


def _check_bias(params: SamplingParams, vocab_size: int) -> None:
    bias = params.logit_bias
    if len(bias) > MAX_LOGIT_BIAS:
        raise _invalid("logit_bias", f"takes at most {MAX_LOGIT_BIAS} tokens")
    if any(not 0 <= token < vocab_size for token, _ in bias):
        raise _invalid("logit_bias", f"is for token ids from 0 to {vocab_size - 1}")
    if len({token for token, _ in bias}) < len(bias):
        raise _invalid("logit_bias", "has a token twice")
    if any(not -100 <= value <= 100 for _, value in bias):
        raise _invalid("logit_bias", "values must be from -100 to 100")


def _within(name: str, value: float, minimum: float, maximum: float) -> None:
    if not minimum <= value <= maximum:  # NaN is in no range
        raise _invalid(name, f"must be from {minimum} to {maximum}")


def _invalid(name: str, problem: str) -> RequestRejected:
    return RequestRejected("invalid_value", f"{name} {problem}", name)
