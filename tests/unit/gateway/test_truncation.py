"""Truncated inputs of encoders: each endpoint with each spelling, and what is read, counted and refused."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import msgspec
import pytest
import tokenizers

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.messages import AnswerEvent, End, Vectors
from inference_worker.contract.request import TokenCounts
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.gateway.core.catalog import ServedModel, upstream_model
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import Prompt, ResponseSpec
from millrace.gateway.prompt_processes.prompt_frames import PackedPrompt
from millrace.gateway.protocols.dialect_readers import READERS
from millrace.gateway.protocols.prompt_bounds import max_characters
from millrace.gateway.protocols.prompts import tokenize_here
from millrace.gateway.protocols.writers import make_writer
from tests.support.engine.tiny_models import make_tokenizer
from tests.support.gateway.inference_requests import read_for_upstream

CORE = make_tokenizer()  # a token for each letter
LENGTH = 12
LONG = "abcdefghijklmnopqrstuvwxyz"
EMBEDS = ServedModel(
    "m",
    Tokenizer(CORE, chat_template=None, special_tokens={}, eos_token_ids=(), model_max_length=LENGTH),
    LENGTH,
    CORE.get_vocab_size(),
    0,
    vector_sizes=(4,),
)
SCORES = dataclasses.replace(EMBEDS, vector_sizes=(), is_cross_encoder=True)

# Endpoint -> its model, its body with one short and two long inputs, and these as texts or pairs.
ENDPOINTS: dict[str, tuple[ServedModel, dict[str, Any], list[tuple[str, ...]]]] = {
    "openai.embedding": (EMBEDS, {"input": ["a", LONG, LONG[::-1]]}, [("a",), (LONG,), (LONG[::-1],)]),
    "cohere.rerank": (
        SCORES,
        {"query": "q", "documents": ["a", {"text": LONG}, LONG[::-1]]},
        [("q", "a"), ("q", LONG), ("q", LONG[::-1])],
    ),
    "vllm.score": (
        SCORES,
        {"text_1": ["q", LONG, LONG], "text_2": ["a", LONG, "b"]},
        [("q", "a"), (LONG, LONG), (LONG, "b")],
    ),
}
# Parameters -> the limit and the side that is dropped; None: longer inputs are refused.
SPELLINGS: list[tuple[dict[str, Any], tuple[int, str] | None]] = [
    ({"truncate": True}, (LENGTH, "right")),
    ({"truncate": False}, None),
    ({"truncate": "END"}, (LENGTH, "right")),
    ({"truncate": "end"}, (LENGTH, "right")),
    ({"truncate": "START"}, (LENGTH, "left")),
    ({"truncate": "NONE"}, None),
    ({"truncation": True}, (LENGTH, "right")),
    ({"truncation": False}, None),
    ({"truncate_prompt_tokens": -1}, (LENGTH, "right")),
    ({"truncate_prompt_tokens": 7}, (7, "right")),
    ({"truncate_prompt_tokens": 7.0}, (7, "right")),
    ({"truncate_prompt_tokens": 10**6}, (LENGTH, "right")),
    ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, (7, "left")),
    ({"truncate": True, "truncation_side": "right"}, (LENGTH, "right")),
    ({"truncate": True, "truncation_direction": "Left"}, (LENGTH, "left")),
    ({"truncate": "START", "truncation": True, "truncation_direction": "left"}, (LENGTH, "left")),
]


def tokenized(model: ServedModel, reader: str, **body: Any) -> Prompt:
    return tokenize_here(model, READERS[reader](json.dumps({"model": "m", **body}).encode()))


def expected(texts: list[tuple[str, ...]], limit: int, direction: str) -> list[list[int]]:
    library = tokenizers.Tokenizer.from_str(CORE.to_str())
    library.enable_truncation(limit, direction=direction)
    return [library.encode(*text).ids for text in texts]


def split(prompt: Prompt) -> list[list[int]]:
    ids = iter(prompt.ids)
    return [[next(ids) for _ in range(length)] for length in prompt.input_lengths]


@pytest.mark.parametrize("truncates", [True, False], ids=["by default", "not by default"])
@pytest.mark.parametrize(("fields", "wanted"), [({}, None), *SPELLINGS], ids=lambda value: json.dumps(value))
@pytest.mark.parametrize("reader", ENDPOINTS)
def test_each_spelling_at_each_endpoint(
    reader: str, fields: dict[str, Any], wanted: tuple[int, str] | None, truncates: bool
) -> None:
    model, body, texts = ENDPOINTS[reader]
    model = dataclasses.replace(model, truncates_inputs=truncates)
    if not fields and truncates:
        wanted = LENGTH, "right"
    if wanted is None:
        with pytest.raises(ApiError) as caught:
            tokenized(model, reader, **body, **fields)
        param = {"openai.embedding": "input", "cohere.rerank": "documents[1]", "vllm.score": "text_2[1]"}[reader]
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", param)
        return
    prompt = tokenized(model, reader, **body, **fields)
    assert split(prompt) == expected(texts, *wanted)
    assert prompt.truncated == "2 of 3"
    assert PackedPrompt.pack(prompt).unpack() == prompt
    if reader != "openai.embedding":
        assert len(prompt.second_starts) == 3


@pytest.mark.parametrize("reader", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"truncate": 1}, "truncate"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),  # the special tokens leave no room
        ({"truncation_side": "both"}, "truncation_side"),
        ({"truncation_direction": ""}, "truncation_direction"),
        ({"truncate": True, "truncation": False}, "truncation"),
        ({"truncate": False, "truncate_prompt_tokens": 5}, "truncate"),
        ({"truncate": "END", "truncation_side": "left"}, "truncation_side"),
        ({"truncated": True}, "truncated"),
    ],
    ids=lambda value: json.dumps(value),
)
def test_an_error_names_the_parameter(reader: str, fields: dict[str, Any], param: str) -> None:
    model, body, _ = ENDPOINTS[reader]
    with pytest.raises(ApiError) as caught:
        tokenized(model, reader, **body, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("keeps_end", [True, False])
def test_token_ids_keep_the_special_tokens_at_their_ends(keeps_end: bool) -> None:
    whole, inner = CORE.encode(LONG).ids, CORE.encode(LONG, add_special_tokens=False).ids
    prompt = tokenized(EMBEDS, "openai.embedding", input=[whole, inner, [7]], truncate="START" if keeps_end else "END")
    with_special, without, short = split(prompt)
    assert with_special == expected([(LONG,)], LENGTH, "left" if keeps_end else "right")[0]
    assert without == (inner[-LENGTH:] if keeps_end else inner[:LENGTH])
    assert (short, prompt.truncated) == ([7], "2 of 3")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("reader", ENDPOINTS)
def test_a_text_with_more_characters_than_any_input_is_truncated(reader: str, side: str) -> None:
    """It is cut before it is tokenized."""
    huge = "ab cd " * max_characters(EMBEDS)
    part = huge[-120:] if side == "left" else huge[:120]
    model, body, texts = {
        "openai.embedding": (EMBEDS, {"input": huge}, (part,)),
        "cohere.rerank": (SCORES, {"query": "q", "documents": [huge]}, ("q", part)),
        "vllm.score": (SCORES, {"text_1": huge, "text_2": huge}, (part, part)),
    }[reader]
    prompt = tokenized(model, reader, **body, truncation_side=side)
    assert split(prompt) == expected([texts], LENGTH, side)
    assert prompt.truncated == "1 of 1"
    with pytest.raises(ApiError) as caught:
        tokenized(model, reader, **body, truncate=False)
    assert caught.value.code == "context_length_exceeded"


def test_a_text_whose_part_has_few_tokens_is_truncated() -> None:
    spaces = " " * max_characters(EMBEDS)
    assert tokenized(EMBEDS, "openai.embedding", input=f"{spaces}a").truncated == "1 of 1"


def test_documents_above_their_own_limit_are_counted() -> None:
    prompt = tokenized(SCORES, "cohere.rerank", query="q", documents=["abc", "ab"], max_tokens_per_doc=2)
    assert (prompt.input_lengths, prompt.truncated) == ((6, 6), "1 of 2")


def test_the_prompt_of_a_model_is_a_part_of_the_input() -> None:
    prompt = tokenized(dataclasses.replace(EMBEDS, input_prompt="query: "), "openai.embedding", input=LONG)
    assert split(prompt) == expected([(f"query: {LONG}",)], LENGTH, "right")


def test_a_pair_in_a_template_is_truncated_inside_of_it() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(CORE, chat_template=template, special_tokens={}, eos_token_ids=(), model_max_length=64)
    model = dataclasses.replace(SCORES, tokenizer=tokenizer, context_length=24, pair_template=template)
    prompt = tokenized(model, "cohere.rerank", query="ab", documents=["c", LONG])
    texts = ["[query]ab[document]c", "[query]ab[document]abcde"]
    assert split(prompt) == [CORE.encode(text, add_special_tokens=False).ids for text in texts]
    assert prompt.truncated == "1 of 2"
    with pytest.raises(ApiError) as caught:
        tokenized(model, "cohere.rerank", query="ab", documents=["c", LONG], truncate=False)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "documents[1]")
    with pytest.raises(ApiError) as caught:
        tokenized(model, "cohere.rerank", query="ab", documents=["c"], truncate_prompt_tokens=10)
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize("reader", ENDPOINTS)
def test_the_body_has_the_number_of_truncated_inputs(reader: str) -> None:
    request = READERS[reader](msgspec.json.encode({"model": "m", **ENDPOINTS[reader][1]}))
    echoed = {"top_n": None, "documents": None} | request.echoed_parameters
    events: list[AnswerEvent] = [
        Vectors("r", 1, 0, struct.pack("<3f", 1, 2, 3)),
        End("r", 1, 1, "stop", None, TokenCounts(7)),
    ]
    for truncated in ("", "2 of 3"):
        spec = ResponseSpec(reader, "r", "m", 0, 7, echoed_parameters=echoed, truncated=truncated)
        assert make_writer(spec, EMBEDS.tokenizer).build_response(events).get("truncated", "") == truncated


def test_models_with_other_limits_have_other_prompts() -> None:
    shorter = dataclasses.replace(EMBEDS, context_length=LENGTH - 1)
    refuses = dataclasses.replace(EMBEDS, truncates_inputs=False)
    generates = dataclasses.replace(EMBEDS, vector_sizes=())
    assert len({model.tokenization for model in (EMBEDS, shorter, refuses, SCORES, generates)}) == 4
    assert dataclasses.replace(generates, context_length=9).tokenization == generates.tokenization


@pytest.mark.parametrize("fields", [{}, *(fields for fields, _ in SPELLINGS)], ids=lambda value: json.dumps(value))
def test_an_upstream_receives_inputs_and_parameters_unchanged(fields: dict[str, Any]) -> None:
    spec = UpstreamSpec(UpstreamEngine.OPENAI, "https://api.example.com/v1", "m", task="embed", dimensions=4)
    body = json.dumps({"model": "m", "input": [LONG * 99], **fields}).encode()
    request = read_for_upstream("openai.embedding", body)
    prompt = tokenize_here(upstream_model("m", "", spec), request)
    assert prompt.upstream is not None
    assert json.loads(prompt.upstream.body) == {"input": [LONG * 99], "encoding_format": "float", **fields}
    assert prompt.truncated == ""
