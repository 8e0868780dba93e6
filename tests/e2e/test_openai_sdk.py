"""The unmodified openai SDK against the running platform."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import httpx2
import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.e2e.keys import make_key, revoke_key
from tests.support.e2e.streams import Stream, sse_events
from tests.support.stack import EMBEDDING_MODEL, MODEL, RERANK_MODEL, Stack, eventually

FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


def request_id(headers: httpx2.Headers) -> str:
    return headers["x-request-id"]


def test_a_chat_completion_is_metered(stack: Stack) -> None:
    raw = stack.client().chat.completions.with_raw_response.create(
        model=MODEL, messages=FRANCE, max_completion_tokens=30, temperature=0
    )
    answer = raw.parse()
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert raw.headers["x-millrace-model"] == MODEL
    assert raw.headers["x-millrace-cache"] in ("miss", "prefix")
    assert int(raw.headers["openai-processing-ms"]) >= 0
    assert Decimal(raw.headers["x-millrace-cost-usd"]) > 0

    event = stack.event(request_id(raw.headers))
    assert event["input"] == answer.usage.prompt_tokens
    assert event["output"] == answer.usage.completion_tokens
    assert (event["outcome"], event["model"]) == ("completed", MODEL)


def test_a_stream_contains_the_same_text_as_a_response(stack: Stack) -> None:
    client = stack.client()
    options = {"model": MODEL, "messages": FRANCE, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.created for chunk in chunks} == {chunks[0].created}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_completions_with_and_without_streaming(stack: Stack) -> None:
    client = stack.client()
    whole = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=8, temperature=0)
    chunks = list(
        client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=8, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8


def test_seeds_reproduce_output_and_stop_strings_end_it(stack: Stack) -> None:
    client = stack.client()
    story: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count from one to twenty in words."}]
    first, second = (
        client.chat.completions.create(model=MODEL, messages=story, max_tokens=24, temperature=1.0, seed=7)
        for _ in range(2)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    text = first.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:3]
    cut = client.chat.completions.create(
        model=MODEL, messages=story, max_tokens=24, temperature=1.0, seed=7, stop=[stop]
    )
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_models_are_listed(stack: Stack) -> None:
    client = stack.client()
    assert sorted(model.id for model in client.models.list()) == sorted((MODEL, EMBEDDING_MODEL, RERANK_MODEL))
    assert client.models.retrieve(MODEL).owned_by == "millrace"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_a_repeated_prompt_is_read_from_the_cache(stack: Stack) -> None:
    client = stack.client()
    long: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "Remember these words: " + "apple pear plum " * 40}
    ]
    for _ in range(2):
        answer = client.chat.completions.create(model=MODEL, messages=long, max_tokens=2, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    assert answer.usage.prompt_tokens - 32 <= cached <= answer.usage.prompt_tokens
    other = client.chat.completions.create(
        model=MODEL, messages=long, max_tokens=2, temperature=0, prompt_cache_key="another"
    )
    assert other.usage is not None
    assert other.usage.prompt_tokens_details is not None
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_errors_raise_the_sdks_exceptions(stack: Stack) -> None:
    client = stack.client()

    def chat(model: str = MODEL, **options: object) -> object:
        return client.chat.completions.create(model=model, messages=FRANCE, **options)  # type: ignore[call-overload]

    with pytest.raises(openai.NotFoundError) as missing:
        chat("gpt-5")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        chat(extra_body={"temprature": 1})
    assert (unknown.value.code, unknown.value.param) == ("unknown_parameter", "temprature")
    with pytest.raises(openai.BadRequestError) as long:
        chat(max_tokens=1_000_000)
    assert (long.value.code, long.value.param) == ("invalid_value", "max_tokens")
    with pytest.raises(openai.AuthenticationError) as wrong:
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key="sk-mr-wrong", max_retries=0).models.list()
    assert wrong.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", "/v1/chat/completions", {"content": b"{"}, 400),
        ("POST", "/v1/chat/completions", {"content": b"x" * (9 << 20)}, 413),
        ("GET", "/v1/chat/completions", {}, 405),
        ("GET", "/v1/nothing", {}, 404),
        ("GET", "/v1/streams/req_unknown", {}, 404),
        ("POST", "/v1/completions", {"json": {"model": MODEL, "prompt": ""}}, 400),
        ("POST", "/v1/completions", {"json": {"model": MODEL, "prompt": [10**9]}}, 400),
    ],
)
def test_invalid_requests_get_a_typed_error(
    stack: Stack, method: str, path: str, options: dict[str, object], status: int
) -> None:
    response = httpx2.request(method, stack.url + path, headers=stack.headers, timeout=60, **options)  # type: ignore[arg-type]
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"].startswith("req_")


def test_a_key_is_accepted_in_both_headers_and_required(stack: Stack) -> None:
    url = f"{stack.url}/v1/models"
    assert httpx2.get(url, headers={"x-api-key": stack.key}).status_code == 200
    assert httpx2.get(url).status_code == 401


async def test_32_concurrent_streams_are_batched_and_metered_exactly(stack: Stack) -> None:
    client = stack.async_client()
    names = "vllm:iteration_tokens_total_count", "millrace_batched_sequences_total", "vllm:generation_tokens_total"
    steps, sequences, tokens = map(stack.metric, names)

    async def one(number: int) -> tuple[str, int, int, str]:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Tell me a story about the number {number}."}],
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text = ""
        async for chunk in raw.parse():
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            usage = chunk.usage
        assert usage is not None
        return request_id(raw.headers), usage.prompt_tokens, usage.completion_tokens, text

    results = await asyncio.gather(*(one(number) for number in range(32)))
    assert all(output == 32 and text for _, _, output, text in results)
    # The worker writes its metrics once a second.
    eventually(lambda: stack.metric("vllm:generation_tokens_total") >= tokens + 32 * 32)
    batch = (stack.metric("millrace_batched_sequences_total") - sequences) / (
        stack.metric("vllm:iteration_tokens_total_count") - steps
    )
    assert batch > 8
    for name, prompt, output, _ in results:
        event = stack.event(name)
        assert (event["input"], event["output"]) == (prompt, output)


async def test_a_disconnected_clients_request_is_cancelled_and_metered(stack: Stack) -> None:
    client = stack.async_client()
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=FRANCE, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    stream, read = raw.parse(), 0
    async for _ in stream:
        read += 1
        if read == 5:
            break
    await stream.close()
    eventually(lambda: stack.metric("millrace_kv_blocks_used") == 0)
    event = stack.event(request_id(raw.headers))
    assert event["outcome"] == "cancelled"
    assert 4 <= event["output"] < 500


def test_streams_of_a_revoked_key_end_with_the_billed_usage(stack: Stack) -> None:
    """Also a stream that another connection resumed. An error waits half a second for the billed usage, which a busy
    machine can exceed."""
    assert any(has_billed_usage_after_revocation(stack) for _ in range(3))


def has_billed_usage_after_revocation(stack: Stack) -> bool:
    """Revoke the key of a stream, check its end, and return whether its last usage is the billed one."""
    secret = make_key(stack, "for a stream")
    stream = Stream(stack, max_tokens=2000, authorization=f"Bearer {secret}")
    stream.read(5)
    resumed = httpx2.Client(timeout=60)
    request = resumed.build_request(
        "GET", f"{stack.url}/v1/streams/{stream.request_id}", headers={"authorization": f"Bearer {secret}"}
    )
    response = resumed.send(request, stream=True)
    events = sse_events(response)
    next(events)
    revoke_key(stack, secret)
    stream.read()
    datas = [data for _, data in events]
    for received in (stream.datas, datas):
        assert msgspec.json.decode(received[-1])["error"]["code"] == "invalid_api_key"
    event = stack.event(stream.request_id)
    assert event["outcome"] == "cancelled"
    reported, resumed_usage = (
        msgspec.json.decode(received[-2])["usage"]["completion_tokens"] for received in (stream.datas, datas)
    )
    assert 1 <= reported <= event["output"]
    assert 1 <= resumed_usage <= event["output"]
    resumed.close()
    stream.close()
    return bool(reported == event["output"])
