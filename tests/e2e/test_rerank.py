"""/v1/rerank and /v1/score of the whole platform, with a cross-encoder that has random weights."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import httpx2
import pytest

from inference_worker.checkpoints.encoder_config import EncoderConfig
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.engine.embeddings.embedding_runner import EmbeddingRunner
from tests.support.e2e.rerank import USD_PER_MILLION, USD_PER_SEARCH
from tests.support.stack import EMBEDDING_MODEL, MODEL, RERANK_MODEL, Stack

QUERY = "how do i reset my pin?"
DOCUMENTS = ["the moon is made of cheese", "reset the pin in the app", "pin", "a much longer answer about pins"]


def post(stack: Stack, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{stack.url}/{path}", json={"model": RERANK_MODEL, **body}, headers=stack.headers, timeout=60)


def expected(stack: Stack) -> tuple[list[float], int]:
    """Return the scores of the documents, computed in this process, and the number of their tokens."""
    folder = stack.data_dir.parent / RERANK_MODEL
    tokenizer = Tokenizer.from_dir(folder)
    pairs = [tokenizer.inputs.encode_pair(QUERY, text) for text in DOCUMENTS]
    runner = EmbeddingRunner(EngineConfig(model_dir=folder, device="cpu"), EncoderConfig.from_dir(folder))
    scores = runner.embed([pair.ids for pair in pairs], [pair.second_start for pair in pairs])[:, 0].tolist()
    return scores, sum(len(pair.ids) for pair in pairs)


def test_documents_are_ranked_and_billed_by_tokens_and_searches(priced: Stack) -> None:
    scores, tokens = expected(priced)
    response = post(priced, "v1/rerank", query=QUERY, documents=[DOCUMENTS[0], *({"text": t} for t in DOCUMENTS[1:])])
    answer = response.json()
    assert response.status_code == 200, response.text
    order = sorted(range(len(DOCUMENTS)), key=lambda n: -scores[n])
    assert [result["index"] for result in answer["results"]] == order
    found = [result["relevance_score"] for result in answer["results"]]
    assert found == pytest.approx([scores[n] for n in order], abs=1e-6)
    assert 0 < min(found) < max(found) < 1
    assert answer["model"] == RERANK_MODEL
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}

    event = priced.event(response.headers["x-request-id"])
    assert (event["input"], event["output"], event["outcome"]) == (tokens, 0, "completed")
    assert answer["meta"]["billed_units"]["search_units"] == event["searches"] == 1
    cost = tokens * USD_PER_MILLION / 1_000_000 + USD_PER_SEARCH
    assert Decimal(response.headers["x-millrace-cost-usd"]) == Decimal(event["cost"]["usd"]) == cost


@pytest.mark.parametrize("path", ["v2/rerank", "rerank"])
def test_cohere_and_vllm_paths_with_documents(priced: Stack, path: str) -> None:
    answer = post(priced, path, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True).json()
    assert len(answer["results"]) == 2
    for result in answer["results"]:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}


@pytest.mark.parametrize("path", ["v1/score", "score"])
def test_scores_are_in_the_order_of_the_request(priced: Stack, path: str) -> None:
    scores, tokens = expected(priced)
    answer = post(priced, path, text_1=QUERY, text_2=DOCUMENTS).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx(scores, abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == tokens
    pairs = post(priced, path, text_1=[QUERY, "x"], text_2=[DOCUMENTS[1], "y"]).json()
    assert pairs["data"][0]["score"] == pytest.approx(scores[1], abs=1e-6)


def test_a_large_body_is_ranked_in_a_prompt_process(priced: Stack) -> None:
    """Documents are truncated as requested, so all have the same score, and equal scores keep their order."""
    answer = post(priced, "v1/rerank", query="a", documents=["x" * 90] * 200, max_tokens_per_doc=4).json()
    assert [result["index"] for result in answer["results"]] == list(range(200))
    assert answer["meta"]["billed_units"]["search_units"] == 2
    assert answer["usage"]["prompt_tokens"] == 200 * (1 + 4 + 3)


@pytest.mark.parametrize("size", [1, 200], ids=["event loop", "prompt process"])
def test_long_documents_are_truncated(priced: Stack, size: int) -> None:
    documents = ["x" * 50, "x" * 90, *["x"] * (size - 1)]
    response = post(priced, "v1/rerank", query="ab", documents=documents)
    answer = response.json()
    assert (response.headers["x-millrace-truncated"], answer["truncated"]) == (f"1 of {size + 1}",) * 2
    assert answer["usage"]["prompt_tokens"] == 55 + 64 + 6 * (size - 1)
    pairs = post(priced, "v1/score", text_1=["x" * 90, "ab"], text_2=["y" * 90, "c"])
    assert pairs.headers["x-millrace-truncated"] == pairs.json()["truncated"] == "1 of 2"
    assert pairs.json()["usage"]["prompt_tokens"] == 64 + 6


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("rerank", {"documents": []}, "documents", "invalid_value"),
        ("rerank", {"documents": ["a"] * 1001}, "documents", "invalid_value"),
        ("rerank", {"documents": ["a", ""]}, "documents[1]", "invalid_value"),
        ("rerank", {"documents": ["a", "b" * 100], "truncate": False}, "documents[1]", "context_length_exceeded"),
        ("rerank", {"documents": ["a", {"title": "b"}]}, "documents[1].text", "missing_required_parameter"),
        ("rerank", {"documents": ["a"], "model": MODEL}, "model", "invalid_value"),
        ("rerank", {"documents": ["a"], "model": EMBEDDING_MODEL}, "model", "invalid_value"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "invalid_value"),
        ("embeddings", {"input": "a"}, "model", "invalid_value"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model", "invalid_value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_names_the_parameter(stack: Stack, path: str, body: dict[str, Any], param: str, code: str) -> None:
    body = body | ({"query": QUERY} if path == "rerank" else {})
    response = post(stack, f"v1/{path}", **body)
    error = json.loads(response.text)["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error
