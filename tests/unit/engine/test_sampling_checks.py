"""Checks of sampling parameters: invalid values are rejected by name and never ignored."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from inference_worker.contract.request import RequestRejected, SamplingParams
from inference_worker.contract.validation import check_sampling, has_penalties
from tests.support.engine.fakes import fake_engine, request

VOCAB = 100
PLAIN = SamplingParams()


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "max_tokens": [1, 10**6],
        "temperature": [0.0, 2.0],
        "top_p": [1e-9, 1.0],
        "top_k": [0, 1, VOCAB + 1],
        "seed": [None, -(2**63), 2**63 - 1],
        "stop": [(), ("x",) * 64, ("x" * 1024,)],
        "stop_token_ids": [(0, VOCAB - 1), (5,) * 64],
        "ignore_eos": [True],
        "min_p": [0.0, 1.0],
        "min_tokens": [0, PLAIN.max_tokens],
        "presence_penalty": [-2.0, 2.0],
        "frequency_penalty": [-2.0, 2.0],
        "repetition_penalty": [0.1, 10.0],
        "logit_bias": [((0, -100.0), (VOCAB - 1, 100.0)), ((7, 0.0),)],
        "logprobs": [None, 0, 20],
        "prompt_logprobs": [None, 0, 20],
        "n": [1, 128],
    }.items(),
)
def test_values_in_range_are_accepted(name: str, values: list[Any]) -> None:
    for value in values:
        check_sampling(replace(PLAIN, **{name: value}), VOCAB)


REFUSED: dict[str, list[Any]] = {
    "max_tokens": [0, -1],
    "temperature": [-0.1, 2.1, math.nan, math.inf],
    "top_p": [0.0, -0.5, 1.1, math.nan],
    "top_k": [-1, 2**31],
    "seed": [-(2**63) - 1, 2**63],
    "stop": [("",), ("x" * 1025,), tuple(str(i) for i in range(65))],
    "stop_token_ids": [(-1,), (VOCAB,), tuple(range(65))],
    "min_p": [-0.1, 1.1, math.nan],
    "min_tokens": [-1, PLAIN.max_tokens + 1],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "repetition_penalty": [0.0, -1.0, 0.09, 10.1, math.nan],
    "logit_bias": [((-1, 1.0),), ((VOCAB, 1.0),), ((1, 100.1),), ((1, -100.1),), ((1, math.nan),), ((1, 1.0),) * 2],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "n": [0, 129],
}


@pytest.mark.parametrize(("name", "values"), REFUSED.items())
def test_an_error_names_the_value_out_of_range(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestRejected) as exc_info:
            check_sampling(replace(PLAIN, **{name: value}), VOCAB)
        assert (exc_info.value.code, exc_info.value.param) == ("invalid_value", name)
        assert name in exc_info.value.message


def test_every_parameter_with_a_range_is_checked() -> None:
    switches = {field.name for field in fields(SamplingParams) if isinstance(getattr(PLAIN, field.name), bool)}
    assert set(REFUSED) | switches == {field.name for field in fields(SamplingParams)}


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
