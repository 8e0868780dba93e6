"""/v1/embeddings through the whole platform, asked by the openai SDK."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import numpy as np
import openai
import pytest

from tests.e2e.conftest import EMBEDDING_MODEL, MODEL, Stack, eventually

TEXTS = ["How do I reset my PIN?", "I forgot my card's PIN, what now?", "The moon is made of cheese."]


def test_like_texts_have_like_vectors_and_are_metered(stack: Stack) -> None:
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


def test_floats_and_base64_texts_and_token_ids_say_the_same(stack: Stack) -> None:
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


async def test_many_callers_at_once(stack: Stack) -> None:
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
        ({"input": "word " * 300}, "input", "context_length_exceeded"),
        ({"dimensions": 100}, "dimensions", "invalid_value"),
        ({"encoding_format": "int8"}, "encoding_format", "invalid_type"),
        ({"model": MODEL}, "model", "invalid_value"),
        ({"extra_body": {"truncate": True}}, "truncate", "unknown_parameter"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    stack: Stack, fields: dict[str, object], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        stack.client().embeddings.create(**{"model": EMBEDDING_MODEL, "input": "a", **fields})  # type: ignore[call-overload]
    assert (caught.value.param, caught.value.code) == (param, code)


def test_an_embedding_model_does_not_chat(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        stack.client().chat.completions.create(model=EMBEDDING_MODEL, messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.param == "model"


@pytest.mark.fault
def test_a_worker_killed_at_it_leaves_one_bill(stack: Stack) -> None:
    worker = stack.pid("inference_worker", model=EMBEDDING_MODEL)
    many = {"model": EMBEDDING_MODEL, "input": ["word " * 200] * 200}
    with httpx.Client(headers=stack.headers, timeout=60) as client:
        request = client.build_request("POST", f"{stack.url}/v1/embeddings", json=many)

        async def send() -> httpx.Response:
            answer = asyncio.create_task(asyncio.to_thread(client.send, request))
            await asyncio.sleep(0.5)
            os.kill(worker, signal.SIGKILL)
            return await answer

        answer = asyncio.run(send())
    assert answer.status_code in (200, 503), answer.text
    stack.wait_until_ready()
    if answer.status_code == 200:  # another process of the worker took it over, before a byte of the answer was sent
        assert stack.event(answer.headers["x-request-id"])["outcome"] == "completed"
    eventually(lambda: stack.client().embeddings.create(model=EMBEDDING_MODEL, input="again").data)
