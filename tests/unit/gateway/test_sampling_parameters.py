"""The declaration of sampling parameters, and everything that must agree with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from inference_worker.contract.request import SAMPLING_PARAMETERS
from inference_worker.contract.upstream_presets import PRESETS
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from inference_worker.contract.validation import RANGES, ParameterRange
from millrace.cli.offline import generate
from millrace.gateway.core.catalog import upstream_model
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.protocols.openai.completions import read_completion
from millrace.gateway.protocols.openai.parameters import RESULT_NAMES
from millrace.gateway.protocols.prompts import tokenize_here
from tests.support.engine.sampling_values import other_value, values_beyond
from tests.support.gateway.inference_requests import read_for_upstream
from tools.openapi.formatting import read_yaml

ROOT = Path(__file__).parents[3]
SCHEMAS = read_yaml((ROOT / "docs" / "openapi.yaml").read_text(encoding="utf-8"))["components"]["schemas"]
CHAT_REFERENCE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8").partition("\n### Tools\n")[0]
PLAYGROUND = ROOT / "frontend" / "templates" / "playground" / "page.html"
# Declared ranges that request bodies do not have: -1 turns top_k off as in vLLM, and a JSON integer may be any seed.
# With max_tokens 0, one token is generated and left out.
OTHER_RANGES = {
    "top_k": ParameterRange(minimum=-1),
    "seed": ParameterRange(),
    "max_tokens": ParameterRange(minimum=0),
}


def body_of(name: str, value: Any) -> bytes:
    given = {str(token): bias for token, bias in value} if name == "logit_bias" else value
    return json.dumps({"model": "m", "prompt": "a", name: given}).encode()


def read(name: str, value: Any) -> InferenceRequest:
    return read_completion(body_of(name, value))


@pytest.mark.parametrize("name", SAMPLING_PARAMETERS)
def test_the_api_document_has_the_declared_range(name: str) -> None:
    schema = SCHEMAS["CompletionBody"]["properties"][name]
    if name in RANGES:
        assert msgspec.convert(schema, ParameterRange) == OTHER_RANGES.get(name, RANGES[name])
    if name not in ("logprobs", "max_tokens"):  # a boolean in chat completions, and at least 1
        assert SCHEMAS["ChatBody"]["properties"][name] == schema


@pytest.mark.parametrize("name", SAMPLING_PARAMETERS)
def test_a_value_of_a_request_reaches_the_engine(name: str) -> None:
    value = other_value(name)
    request = read(name, value)
    assert (request.max_tokens if name == "max_tokens" else getattr(request.sampling, name)) == value
    assert name in RESULT_NAMES  # endpoints without it refuse it


@pytest.mark.parametrize("name", [name for name in RANGES if name not in {"max_tokens", *OTHER_RANGES}])
def test_a_request_with_a_value_out_of_range_is_refused(name: str) -> None:
    for value in (each for each in values_beyond(name) if each == each):  # JSON has no NaN
        with pytest.raises(ApiError) as exc_info:
            read(name, value)
        assert (exc_info.value.status, exc_info.value.param) == (400, name)
        assert exc_info.value.message == f"{name} must be {RANGES[name]}."


@pytest.mark.parametrize("preset", [name for name, each in PRESETS.items() if each.engine == UpstreamEngine.OPENAI])
@pytest.mark.parametrize("name", [name for name in SAMPLING_PARAMETERS if name != "max_tokens"])
def test_an_upstream_receives_a_parameter_or_its_request_is_refused(preset: str, name: str) -> None:
    body = body_of(name, other_value(name))
    request = read_for_upstream("openai.completion", body)
    model = upstream_model("m", "", UpstreamSpec(UpstreamEngine.OPENAI, "https://a.example/v1", "m", preset))
    if name not in PRESETS[preset].parameters:
        with pytest.raises(ApiError) as exc_info:
            tokenize_here(model, request)
        assert (exc_info.value.code, exc_info.value.param) == ("unsupported_parameter", name)
        return
    upstream = tokenize_here(model, request).upstream
    assert upstream is not None
    fields = json.loads(upstream.body)
    assert fields[getattr(PRESETS[preset], name, name)] == json.loads(body)[name]


@pytest.mark.parametrize("name", SAMPLING_PARAMETERS)
def test_the_reference_names_the_parameter(name: str) -> None:
    assert f"`{name}`" in CHAT_REFERENCE


def test_the_reference_states_the_declared_ranges() -> None:
    stated = re.findall(r"((?:`\w+`, )*`\w+`) (-?[\d.]+) to ([\d.]+)", CHAT_REFERENCE)
    found = {
        name: ParameterRange(minimum=float(low), maximum=float(high))
        for names, low, high in stated
        for name in re.findall(r"\w+", names)
        if name in RANGES
    }
    assert found
    assert found == {name: RANGES[name] for name in found}


def test_the_command_has_the_declared_ranges() -> None:
    options = {option.name: option.type for option in generate.params if option.name in RANGES}
    assert options.keys() >= {"temperature", "max_tokens"}
    for name, type_ in options.items():
        if isinstance(type_, click.IntRange | click.FloatRange):
            assert ParameterRange(minimum=type_.min, maximum=type_.max) == RANGES[name]


def test_the_playground_has_the_declared_ranges() -> None:
    fields = re.findall(r'name="(\w+)" type="number" min="(\d+)" max="(\d+)"', PLAYGROUND.read_text(encoding="utf-8"))
    found = {name: float(high) for name, _low, high in fields if RANGES[name].maximum is not None}
    assert found == {name: RANGES[name].maximum for name in ("temperature", "top_p")}
