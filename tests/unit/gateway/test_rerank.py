"""Rerank and score requests in the gateway: parsing of bodies, tokenization of pairs, and writing of scores."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.tenant.models.page import Snippets
from inference_worker.checkpoints.encoder_config import ModelTask, model_task
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.messages import AnswerEvent, End, Vectors
from inference_worker.contract.request import TokenCounts
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import EncoderInputs, InferenceRequest, ResponseSpec
from millrace.gateway.prompt_processes.prompt_frames import PackedPrompt
from millrace.gateway.protocols.dialect_readers import READERS
from millrace.gateway.protocols.encoder_inputs import count_searches
from millrace.gateway.protocols.prompt_bounds import SMALL_PROMPT_COST, prompt_cost
from millrace.gateway.protocols.prompts import tokenize
from millrace.gateway.protocols.rerank import (
    MAX_PAIRS,
    MAX_QUERY_CHARACTERS,
    RERANK,
    RerankWriter,
    ScoreWriter,
    read_rerank,
    read_score,
)
from tests.support.engine.tiny_models import make_cross_encoder, make_tokenizer

CORE = make_tokenizer()
MODEL = ServedModel(
    "m",
    Tokenizer(CORE, chat_template=None, special_tokens={}, eos_token_ids=(), model_max_length=12),
    12,
    CORE.get_vocab_size(),
    0,
    is_cross_encoder=True,
)


def rerank(**fields: Any) -> InferenceRequest:
    return read_rerank(msgspec.json.encode({"model": "m", "query": "q", "documents": ["a", "b"], **fields}))


def score(first: Any, second: Any, **fields: Any) -> InferenceRequest:
    return read_score(msgspec.json.encode({"model": "m", "text_1": first, "text_2": second, **fields}))


def write(writer: type[RerankWriter] | type[ScoreWriter], request: InferenceRequest, *scores: float) -> dict[str, Any]:
    spec = ResponseSpec("d", "req_1", "m", 5, 7, echoed_parameters=request.echoed_parameters)
    data = struct.pack(f"<{len(scores)}f", *scores)
    events: list[AnswerEvent] = [
        Vectors("req_1", 1, 0, data),
        End("req_1", 1, 1, "stop", None, TokenCounts(7, searches=2)),
    ]
    return writer(spec, None).build_response(events)  # type: ignore[arg-type]


def test_documents_are_texts_or_objects() -> None:
    request = rerank(documents=["a", {"text": "b", "title": "t"}], rank_fields=["text"], max_tokens_per_doc=3)
    assert request.encoder == EncoderInputs(("a", "b"), ("q",), 3, param="documents")
    assert request.analysis.ignored == ("documents[].title",)


@pytest.mark.parametrize(
    ("first", "second", "queries", "inputs"),
    [
        pytest.param("a", "b", ("a",), ("b",), id="one"),
        pytest.param("a", ["b", "c"], ("a",), ("b", "c"), id="one to many"),
        pytest.param(["a", "b"], ["c", "d"], ("a", "b"), ("c", "d"), id="pairs"),
    ],
)
def test_texts_are_paired(first: Any, second: Any, queries: tuple[str, ...], inputs: tuple[str, ...]) -> None:
    request = score(first, second)
    assert (request.encoder.queries, request.encoder.inputs) == (queries, inputs)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"documents": []}, "documents", "invalid_value"),
        ({"documents": ["a"] * (MAX_PAIRS + 1)}, "documents", "invalid_value"),
        ({"documents": ["a", ""]}, "documents[1]", "invalid_value"),
        ({"documents": "a"}, "documents", "invalid_type"),
        ({"documents": [{"title": "a"}]}, "documents[0].text", "missing_required_parameter"),
        ({"query": ""}, "query", "invalid_value"),
        ({"query": "q" * (MAX_QUERY_CHARACTERS // 2 + 1)}, "query", "invalid_value"),
        ({"top_n": 0}, "top_n", "invalid_value"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc", "invalid_value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_names_the_parameter(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as exc_info:
        rerank(**fields)
    assert (exc_info.value.status, exc_info.value.param, exc_info.value.code) == (400, param, code)


@pytest.mark.parametrize(("first", "second"), [(["a", "b"], ["c"]), (["a", "b"], "c"), (["a", "b"], ["c"] * 3)])
def test_lists_of_different_lengths_are_rejected(first: Any, second: Any) -> None:
    with pytest.raises(ApiError) as exc_info:
        score(first, second)
    assert exc_info.value.param == "text_1"


async def test_a_pair_is_tokenized_as_by_the_library() -> None:
    prompt = await tokenize(MODEL, rerank(query="ab", documents=["c", "de f"]))
    pairs = [CORE.encode("ab", text) for text in ("c", "de f")]
    assert prompt.ids == [token for pair in pairs for token in pair.ids]
    assert prompt.input_lengths == tuple(len(pair.ids) for pair in pairs)
    assert prompt.second_starts == (4, 4)
    assert prompt.searches == 1
    assert PackedPrompt.pack(prompt).unpack() == prompt


async def test_a_pair_is_rendered_if_the_model_has_a_template_for_it() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(CORE, chat_template=template, special_tokens={}, eos_token_ids=(), model_max_length=64)
    model = dataclasses.replace(
        MODEL, tokenizer=tokenizer, context_length=64, pair_template=template, input_prompt="rank"
    )
    prompt = await tokenize(model, rerank(query="ab", documents=["cde", "f"], max_tokens_per_doc=2))
    texts = ["[system]rank[query]ab[document]cd", "[system]rank[query]ab[document]f"]
    assert prompt.ids == [token for text in texts for token in CORE.encode(text, add_special_tokens=False).ids]
    assert prompt.second_starts == prompt.input_lengths
    broken = Tokenizer(CORE, chat_template="{{ 1 / 0 }}", special_tokens={}, eos_token_ids=(), model_max_length=64)
    with pytest.raises(ApiError) as exc_info:
        await tokenize(dataclasses.replace(model, tokenizer=broken), rerank())
    assert (exc_info.value.status, exc_info.value.param) == (400, "documents[0]")


async def test_a_document_has_a_limit_of_its_own() -> None:
    prompt = await tokenize(MODEL, rerank(documents=["x" * 50, "y"], max_tokens_per_doc=7))
    assert prompt.input_lengths == (11, 5)


def test_a_repeated_query_counts_for_each_document() -> None:
    assert prompt_cost(rerank(query="q" * 100, documents=["a"] * 100), 1000) > SMALL_PROMPT_COST


@pytest.mark.parametrize(
    ("queries", "searches"),
    [
        (["q"], 1),
        (["q"] * 100, 1),
        (["q"] * 101, 2),
        (["q"] * 1000, 10),
        (["a", "b"], 2),
        (["a"] * 101 + ["b"] * 100, 3),
    ],
)
def test_a_search_has_one_query_and_up_to_100_documents(queries: list[str], searches: int) -> None:
    assert count_searches(queries) == searches


async def test_searches_are_counted_from_all_pairs() -> None:
    assert (await tokenize(MODEL, rerank(documents=["a"] * 101))).searches == 2
    assert (await tokenize(MODEL, score(["a", "b", "a"], ["c", "d", "e"]))).searches == 2


def test_results_are_sorted_and_ties_keep_their_order() -> None:
    request = rerank(documents=["a", "b", "c", "d"], top_n=3, return_documents=True)
    answer = write(RerankWriter, request, 0.25, 0.5, 0.25, 0.125)
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.5, "document": {"text": "b"}},
        {"index": 0, "relevance_score": 0.25, "document": {"text": "a"}},
        {"index": 2, "relevance_score": 0.25, "document": {"text": "c"}},
    ]
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert answer["meta"] == {"billed_units": {"search_units": 2}}
    whole = write(RerankWriter, rerank(), -1.0, 2.0)
    assert whole["results"] == [{"index": 1, "relevance_score": 2.0}, {"index": 0, "relevance_score": -1.0}]


def test_a_models_task_is_known_from_its_source(tmp_path: Path) -> None:
    make_cross_encoder(tmp_path / "scores")
    sources = ("embedded", "embedded:minilm", str(tmp_path / "scores"), str(tmp_path / "none"), "/models/m.gguf")
    assert [model_task(source) for source in sources] == ["generate", "embed", "rerank", "generate", "generate"]


@pytest.mark.parametrize("task", ["generate", "embed", "rerank"])
def test_the_consoles_examples_are_valid(task: ModelTask) -> None:
    snippets = Snippets("http://127.0.0.1:8000/v1", "m", task)
    compile(snippets.python, "snippet", "exec")
    body = re.search(r"-d '(.*)'$", snippets.curl, re.DOTALL)
    assert body is not None
    dialect = {"generate": "openai.chat", "embed": "openai.embedding", "rerank": RERANK}[task]
    assert READERS[dialect](body[1].encode()).model == "m"


def test_scores_keep_the_order_of_the_request() -> None:
    answer = write(ScoreWriter, score("a", ["b", "c"]), 0.25, 0.5)
    assert answer == {
        "id": "req_1",
        "object": "list",
        "created": 5,
        "model": "m",
        "data": [{"index": 0, "object": "score", "score": 0.25}, {"index": 1, "object": "score", "score": 0.5}],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
