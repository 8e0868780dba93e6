"""/v1/embeddings of the whole platform, with the openai SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import tokenizers

from inference_worker.checkpoints.model_source import embedded_source
from inference_worker.contract.settings import EMBEDDED_ENCODER
from tests.support.e2e.batches import finished, results, upload
from tests.support.stack import EMBEDDING_MODEL, MODEL, Stack, eventually

TEXTS = ["How do I reset my PIN?", "I forgot my card's PIN, what now?", "The moon is made of cheese."]


def test_similar_texts_have_similar_vectors_and_are_metered(stack: Stack) -> None:
    raw = stack.client().embeddings.with_raw_response.create(model=EMBEDDING_MODEL, input=TEXTS)
    answer = raw.parse()
    vectors = np.array([each.embedding for each in answer.data])
    assert vectors.shape == (3, 384)
    assert [each.index for each in answer.data] == [0, 1, 2]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens
    assert answer.model == EMBEDDING_MODEL
    assert int(raw.headers["openai-processing-ms"]) >= 0

    event = stack.event(raw.headers["x-request-id"])
    assert (event["input"], event["output"]) == (answer.usage.prompt_tokens, 0)
    assert (event["outcome"], event["model"]) == ("completed", EMBEDDING_MODEL)


def test_all_input_and_output_formats_give_the_same_vectors(stack: Stack) -> None:
    client = stack.client()
    hello = [101, 7592, 2088, 102]
    floats = client.embeddings.create(model=EMBEDDING_MODEL, input="hello world", encoding_format="float")
    base64 = client.embeddings.create(model=EMBEDDING_MODEL, input=["hello world"])
    tokens = client.embeddings.create(model=EMBEDDING_MODEL, input=hello, dimensions=384)
    lists = client.embeddings.create(model=EMBEDDING_MODEL, input=[hello, hello])
    assert floats.usage.prompt_tokens == 4
    assert lists.usage.prompt_tokens == 8
    for other in (base64.data[0], tokens.data[0], *lists.data):
        np.testing.assert_allclose(other.embedding, floats.data[0].embedding, atol=1e-6)


async def test_concurrent_requests_give_the_same_vectors(stack: Stack) -> None:
    client = stack.async_client()
    alone = (await client.embeddings.create(model=EMBEDDING_MODEL, input=TEXTS[0])).data[0].embedding
    answers = await asyncio.gather(
        *(client.embeddings.create(model=EMBEDDING_MODEL, input=[f"Question {n}"] * n + TEXTS[:1]) for n in range(24))
    )
    for n, answer in enumerate(answers):
        assert len(answer.data) == n + 1
        np.testing.assert_allclose(answer.data[-1].embedding, alone, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input", "invalid_value"),
        ({"input": [1, "a"]}, "input", "invalid_value"),
        ({"input": [30_522]}, "input", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": "word " * 300, "extra_body": {"truncate": False}}, "input", "context_length_exceeded"),
        ({"dimensions": 100}, "dimensions", "invalid_value"),
        ({"encoding_format": "int8"}, "encoding_format", "invalid_type"),
        ({"model": MODEL}, "model", "invalid_value"),
        ({"extra_body": {"truncate": "MIDDLE"}}, "truncate", "invalid_value"),
    ],
)
def test_an_error_names_the_input_that_cannot_be_embedded(
    stack: Stack, fields: dict[str, object], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as exc_info:
        stack.client().embeddings.create(**{"model": EMBEDDING_MODEL, "input": "a", **fields})  # type: ignore[call-overload]
    assert (exc_info.value.param, exc_info.value.code) == (param, code)


def test_a_truncated_input_has_the_vector_of_the_part_that_was_read(stack: Stack) -> None:
    """Chunks of 1,000 characters have more tokens than the bundled model takes."""
    core = tokenizers.Tokenizer.from_file(str(embedded_source(EMBEDDED_ENCODER) / "tokenizer.json"))
    core.no_truncation()
    texts = ["How is a pin reset? " * 80, "Never by email, only in the app. " * 60, "Forgotten! " * 200]
    room = 256 - core.num_special_tokens_to_add(False)
    ends = [core.encode(text, add_special_tokens=False).offsets[room - 1][1] for text in texts]
    parts = [text[:end] for text, end in zip(texts, ends, strict=True)]
    client = stack.client().embeddings.with_raw_response
    whole = client.create(model=EMBEDDING_MODEL, input=[*texts, "short"])
    cut = client.create(model=EMBEDDING_MODEL, input=[*parts, "short"])
    assert whole.headers["x-millrace-truncated"] == "3 of 4"
    assert "x-millrace-truncated" not in cut.headers
    vectors = [np.array([each.embedding for each in raw.parse().data]) for raw in (whole, cut)]
    np.testing.assert_allclose(*vectors, atol=1e-6)
    usage = whole.parse().usage
    assert usage == cut.parse().usage
    assert usage.prompt_tokens == 3 * 256 + 3
    request_id = whole.headers["x-request-id"]
    assert stack.event(request_id)["input"] == usage.prompt_tokens

    def record() -> Any:
        url = f"{stack.url}/api/requests/{request_id}"
        return httpx2.get(url, headers=stack.headers, timeout=60).json()["record"]

    eventually(lambda: record() is not None)
    assert record()["route"]["truncated_inputs"] == 3


def test_a_result_of_a_batch_has_the_number_of_truncated_inputs(stack: Stack) -> None:
    client = stack.client()
    body = {"model": EMBEDDING_MODEL, "input": ["word " * 300, "word"]}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body | fields}
        for name, fields in (("default", {}), ("refused", {"truncate": False}))
    ]
    made = client.batches.create(
        input_file_id=upload(client, lines), endpoint="/v1/embeddings", completion_window="24h"
    )
    batch = finished(client, made.id)
    answer = results(client, batch.output_file_id)["default"]["response"]["body"]
    assert (answer["truncated"], answer["usage"]["prompt_tokens"]) == ("1 of 2", 256 + 3)
    error = results(client, batch.error_file_id)["refused"]["response"]["body"]["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_an_embedding_model_rejects_chat_completions(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as exc_info:
        stack.client().chat.completions.create(model=EMBEDDING_MODEL, messages=[{"role": "user", "content": "Hi"}])
    assert exc_info.value.param == "model"
