"""Limits of answers under other servers' names: they have their effect or are refused, at every endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.gateway.core.catalog import ServedModel, UnknownTokenizer, upstream_model
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.protocols.prompts import tokenize_here
from tests.support.gateway.inference_requests import read_for_upstream
from tests.support.gateway.requests import BODIES, ENCODERS

SCHEMA = {"type": "object"}
# Field -> value, and the parameters of chat completions, completions, responses and messages.
LENGTH = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_tokens")
FORMAT = ("response_format", "structured_outputs", "text.format", "output_config.format")
STOP = ("stop", "stop", None, "stop_sequences")
COUNT = ("n", "n", None, None)
LIMITS: list[tuple[dict[str, Any], str, tuple[str | None, ...]]] = [
    *(
        ({name: 3}, name, LENGTH)
        for name in (
            *("max_new_tokens", "n_predict", "num_predict", "max_length", "max_gen_len", "max_tokens_to_sample"),
            *("tokens_to_generate", "maxNewTokens", "MAX-NEW-TOKENS", "nPredict", "maxTokenCount", "maxOutputTokens"),
        )
    ),
    *(
        ({container: {name: 3}}, f"{container}.{name}", LENGTH)
        for container, name in (
            *(("options", "num_predict"), ("parameters", "max_new_tokens"), ("generationConfig", "maxOutputTokens")),
            *(("sampling_params", "max_new_tokens"), ("extra_body", "max_tokens"), ("inferenceConfig", "maxTokens")),
            ("flavor", "max_new_tokens"),
        )
    ),
    ({"a": {"b": {"c": {"max_new_tokens": 3}}}}, "a.b.c.max_new_tokens", LENGTH),
    *(
        ({name: value}, name, FORMAT)
        for name, value in (
            *(("grammar", 'root ::= "a"'), ("json_schema", SCHEMA), ("format", "json"), ("regex", "a+")),
            *(
                ("ebnf", 'root ::= "a"'),
                ("responseSchema", SCHEMA),
                ("structural_tag", {"type": "x"}),
                ("schema", SCHEMA),
            ),
            *(("guided_decoding", {"regex": "a"}), ("guided_whitespace_pattern", " "), ("guidedJson", SCHEMA)),
        )
    ),
    ({"options": {"format": "json"}}, "options.format", FORMAT),
    ({"nvext": {"guided_json": SCHEMA}}, "nvext.guided_json", FORMAT),
    ({"parameters": {"stop": ["a"]}}, "parameters.stop", STOP),
    ({"stopSequences": ["a"]}, "stopSequences", STOP),
    ({"stop_strings": "a"}, "stop_strings", STOP),
    ({"candidate_count": 2}, "candidate_count", COUNT),
    ({"generation_config": {"num_return_sequences": 2}}, "generation_config.num_return_sequences", COUNT),
    ({"options": {"temperature": 0}}, "options.temperature", ("temperature",) * 4),
    ({"options": {"top_k": 4}}, "options.top_k", ("top_k", "top_k", None, "top_k")),
    ({"bad_words": ["a"]}, "bad_words", ("logit_bias", "logit_bias", None, None)),
    ({"min_new_tokens": 4}, "min_new_tokens", ("min_tokens", "min_tokens", None, None)),
]
PARAMETERS = ("openai.chat", "openai.completion", "openai.responses", "anthropic.messages")
NEUTRAL: list[dict[str, Any]] = [
    *({"n_predict": -1}, {"grammar": ""}, {"json_schema": {}}, {"format": {"type": "text"}}, {"candidate_count": 1}),
    *({"options": {"num_predict": -1, "num_ctx": 4096}}, {"max_new_tokens": None}, {"options": {"max_tokens": None}}),
    *({"flavor": {"format": "x", "a": [1]}}, {"reasoning": {"max_tokens": 9}}, {"responseMimeType": "text/plain"}),
]


OWN = ServedModel("m", UnknownTokenizer(), 100, 100, 0)


def read(dialect: str, fields: Mapping[str, Any], bodies: Mapping[str, dict[str, Any]] = BODIES) -> InferenceRequest:
    body = msgspec.json.encode({"model": "m", **bodies[dialect], **fields})
    return read_for_upstream(dialect, body)


def refusal(action: Callable[[], object]) -> ApiError:
    with pytest.raises(ApiError) as exc_info:
        action()
    return exc_info.value


@pytest.mark.parametrize(("fields", "path", "parameters"), LIMITS, ids=[path for _, path, _ in LIMITS])
def test_a_limit_is_refused_with_the_parameter_to_use(
    fields: dict[str, Any], path: str, parameters: tuple[str | None, ...]
) -> None:
    for dialect, parameter in zip((*PARAMETERS, "openai.realtime"), (*parameters, parameters[0]), strict=True):
        error = refusal(lambda: tokenize_here(OWN, read(dialect, fields)))  # noqa: B023
        assert (error.status, error.param) == (400, path), dialect
        end = "Omit it." if parameter is None else f"Use {parameter!r}."
        assert error.message.endswith(end), (dialect, error.message)


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_a_value_that_limits_nothing_is_accepted(fields: dict[str, Any]) -> None:
    for dialect in BODIES:
        assert read(dialect, fields).analysis.foreign_limits == ()


@pytest.mark.parametrize("dialect", ENCODERS)
def test_an_endpoint_without_text_accepts_and_names_limits_of_text(dialect: str) -> None:
    request = read(dialect, {"max_new_tokens": 3, "stop_strings": ["a"]}, ENCODERS)
    assert (request.analysis.ignored, request.analysis.foreign_limits) == (("max_new_tokens", "stop_strings"), ())


@pytest.mark.parametrize(
    ("dialect", "name", "parameter"),
    [
        ("openai.embedding", "output_dimension", "dimensions"),
        ("openai.embedding", "output_dtype", "encoding_format"),
        ("cohere.rerank", "max_results", "top_n"),
    ],
)
def test_limits_of_encoders(dialect: str, name: str, parameter: str) -> None:
    ((path, message),) = read(dialect, {name: 8}, ENCODERS).analysis.foreign_limits
    assert path == name
    assert message.endswith(f"Use {parameter!r}.")


def test_another_dialects_name_is_refused_with_the_own_one() -> None:
    for dialect, name, parameter in (
        ("openai.responses", "max_tokens", "max_output_tokens"),
        ("openai.completion", "max_completion_tokens", "max_tokens"),
        ("anthropic.messages", "stop", "stop_sequences"),
        ("openai.responses", "response_format", "text.format"),
    ):
        assert refusal(lambda: read(dialect, {name: 3})).message.endswith(f"Use {parameter!r}.")  # noqa: B023


def test_a_limit_within_a_supported_object_is_refused() -> None:
    assert refusal(lambda: read("openai.responses", {"text": {"max_tokens": 3}})).param == "text.max_tokens"


def test_an_upstream_of_the_dialect_takes_constraints_but_no_other_name_of_the_length() -> None:
    upstream = upstream_model("m", "", UpstreamSpec(UpstreamEngine.OPENAI, "https://a.example/v1", "m", "llamacpp"))
    prompt = tokenize_here(upstream, read("openai.chat", {"grammar": "a"}))
    assert prompt.upstream is not None
    assert (msgspec.json.decode(prompt.upstream.body)["grammar"], prompt.ignored) == ("a", ())
    for dialect, fields in (("anthropic.messages", {"grammar": "a"}), ("openai.chat", {"options": {"format": "json"}})):
        assert refusal(lambda: tokenize_here(upstream, read(dialect, fields))).param in (*fields, "options.format")  # noqa: B023


def test_output_format_is_the_older_name_of_a_format() -> None:
    text_format = {"type": "json_schema", "schema": SCHEMA}
    older = read("anthropic.messages", {"output_format": text_format})
    newer = read("anthropic.messages", {"output_config": {"format": text_format}})
    assert older.structured is not None
    assert newer.structured is not None
    assert (older.structured.text, older.structured.param) == (newer.structured.text, "output_format.schema")
    both = {"output_format": text_format, "output_config": {"format": {**text_format, "schema": {}}}}
    assert refusal(lambda: read("anthropic.messages", both)).param == "output_format"
    upstream = upstream_model("m", "", UpstreamSpec(UpstreamEngine.ANTHROPIC, "https://a.example", "m", "anthropic"))
    sent = tokenize_here(upstream, older).upstream
    assert sent is not None
    fields = msgspec.json.decode(sent.body)
    assert (fields["output_config"], "output_format" in fields) == ({"format": text_format}, False)


def test_the_work_of_large_objects_is_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"a": deep}
    wide = {f"k{number}": {"x": 1} for number in range(5000)}
    assert read("openai.chat", {"deep": deep, "wide": wide}).analysis.foreign_limits == ()
