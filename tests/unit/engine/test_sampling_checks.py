"""Checks of sampling parameters: invalid values are rejected by name and never ignored."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from inference_worker.contract.request import SAMPLING_PARAMETERS, RequestRejected, SamplingParams
from inference_worker.contract.validation import RANGES, check_sampling, has_penalties
from tests.support.engine.fakes import fake_engine, request
from tests.support.engine.sampling_values import edges, other_value, values_beyond

VOCAB = 100
PLAIN = SamplingParams()


# Parameters without a declared range: values that are accepted and values that are refused.
ACCEPTED: dict[str, list[Any]] = {
    "stop": [(), ("x",) * 64, ("x" * 1024,)],
    "stop_token_ids": [(0, VOCAB - 1), (5,) * 64],
    "min_tokens": [0, PLAIN.max_tokens],
    "logit_bias": [((0, -100.0), (VOCAB - 1, 100.0)), ((7, 0.0),)],
}
REFUSED: dict[str, list[Any]] = {
    "stop": [("",), ("x" * 1025,), tuple(str(i) for i in range(65))],
    "stop_token_ids": [(-1,), (VOCAB,), tuple(range(65))],
    "min_tokens": [-1, PLAIN.max_tokens + 1],
    "logit_bias": [((-1, 1.0),), ((VOCAB, 1.0),), ((1, 100.1),), ((1, -100.1),), ((1, math.nan),), ((1, 1.0),) * 2],
}


@pytest.mark.parametrize("name", SAMPLING_PARAMETERS)
def test_values_in_range_are_accepted(name: str) -> None:
    for value in (getattr(PLAIN, name), other_value(name), *ACCEPTED.get(name, edges(name) if name in RANGES else ())):
        check_sampling(replace(PLAIN, **{name: value}), VOCAB)


@pytest.mark.parametrize("name", [*RANGES, *REFUSED])
def test_an_error_names_the_value_out_of_range(name: str) -> None:
    for value in REFUSED.get(name) or values_beyond(name):
        with pytest.raises(RequestRejected) as exc_info:
            check_sampling(replace(PLAIN, **{name: value}), VOCAB)
        assert (exc_info.value.code, exc_info.value.param) == ("invalid_value", name)
        assert name in exc_info.value.message


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": 2.1}, "temperature must be from 0 to 2.0"),
        ({"top_p": -0.1}, "top_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 0.1 to 10"),
        ({"min_tokens": 17}, "min_tokens must be from 0 to 16"),
    ],
)
def test_an_error_states_the_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected) as exc_info:
        check_sampling(replace(PLAIN, **params), VOCAB)
    assert exc_info.value.message == message


def test_every_parameter_is_checked() -> None:
    switches = {name for name in SAMPLING_PARAMETERS if isinstance(getattr(PLAIN, name), bool)}
    assert RANGES.keys() | REFUSED.keys() | switches == set(SAMPLING_PARAMETERS)


def test_too_many_logit_biases_are_rejected() -> None:
    bias = tuple((token, 1.0) for token in range(301))
    check_sampling(replace(PLAIN, logit_bias=bias[:300]), 1000)
    with pytest.raises(RequestRejected):
        check_sampling(replace(PLAIN, logit_bias=bias), 1000)


def test_the_engine_rejects_invalid_parameters_at_submission() -> None:
    engine, _ = fake_engine()
    with pytest.raises(RequestRejected) as exc_info:
        engine.add_request(request("x", 5, min_p=2.0))
    assert exc_info.value.param == "min_p"
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"min_tokens": 5, "seed": 1, "top_p": 0.5, "logit_bias": ((1, 1.0),), "logprobs": 3}, False),
    ],
)
def test_only_penalties_require_earlier_tokens(params: dict[str, Any], expected: bool) -> None:
    assert has_penalties(SamplingParams(**params)) is expected
