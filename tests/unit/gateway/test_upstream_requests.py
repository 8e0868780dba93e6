"""Requests to upstreams: what a preset changes, what is refused, and the bound of the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_worker.contract.upstream_presets import PRESETS, preset_of
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.gateway.core.catalog import upstream_model
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import Prompt
from millrace.gateway.protocols.prompts import tokenize_here
from tests.support.gateway.inference_requests import read_for_upstream

URL = "https://api.example.com/v1"
HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}}

FILE = {"type": "file", "file_id": "file_of_the_operator", "url": "https://example.com/a.png"}


def spec(preset: str = "", **fields: Any) -> UpstreamSpec:
    engine = PRESETS[preset].engine if preset else UpstreamEngine.OPENAI
    return UpstreamSpec(engine, URL, "m", preset, **{"context_length": 10_000, **fields})


def prompt_of(upstream: UpstreamSpec, reader: str = "openai.chat", **fields: Any) -> Prompt:
    given = {"model": "m", "messages": HELLO} if reader in ("openai.chat", "anthropic.messages") else {"model": "m"}
    if reader == "anthropic.messages":
        given["max_tokens"] = 100
    body = json.dumps({**given, **fields}).encode()
    request = read_for_upstream(reader, body)
    return tokenize_here(upstream_model("m", "", upstream), request)


def build_request_body(upstream: UpstreamSpec, reader: str = "openai.chat", **fields: Any) -> dict[str, Any]:
    prompt = prompt_of(upstream, reader, **fields)
    assert prompt.upstream is not None
    return dict(json.loads(prompt.upstream.body))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_writes_a_request(name: str) -> None:
    upstream = spec(name)
    assert preset_of(upstream) is PRESETS[name]
    body = build_request_body(upstream, temperature=0.5, stop=["x"], max_tokens=9)
    assert body["temperature"] == 0.5
    assert body.get("stop", body.get("stop_sequences")) == ["x"]
    assert not {"model", "stream", "max_tokens", "max_completion_tokens"} & set(body)


def test_presets_rename_parameters() -> None:
    assert build_request_body(spec("mistral"), seed=7)["random_seed"] == 7
    assert build_request_body(spec("llamacpp"), repetition_penalty=1.5)["repeat_penalty"] == 1.5
    assert build_request_body(spec("vllm"), guided_regex="a+")["structured_outputs"] == {"regex": "a+"}
    assert build_request_body(spec("openai"), logit_bias={"5": 1})["logit_bias"] == {"5": 1.0}


def test_fields_that_choose_price_or_place_are_not_carried() -> None:
    prompt = prompt_of(spec("openai"), store=True, provider={"order": ["x"]}, service_tier="priority", new_field=1)
    assert prompt.upstream is not None
    assert set(json.loads(prompt.upstream.body)) == {"messages", "new_field"}
    assert prompt.ignored == ("store", "provider")
    prompt = prompt_of(spec("vllm"), cache_salt="of another tenant", kv_transfer_params={"a": 1})
    assert prompt.upstream is not None
    assert set(json.loads(prompt.upstream.body)) == {"messages"}
    assert prompt.ignored == ("cache_salt", "kv_transfer_params")


@pytest.mark.parametrize(
    ("upstream", "reader", "fields", "param"),
    [
        (spec("openai"), "openai.chat", {"top_k": 5}, "top_k"),
        (spec("groq"), "openai.chat", {"n": 2}, "n"),
        (spec("ollama"), "openai.chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, None),
        (
            spec("ollama"),
            "openai.chat",
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
            "tool_choice",
        ),
        (spec(tools=False), "openai.chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (spec("openai"), "openai.chat", {"logprobs": True}, "logprobs"),
        (spec("openai"), "openai.chat", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        (spec("openai"), "openai.completion", {"prompt": [1, 2]}, "prompt"),
        (spec("openai"), "openai.completion", {"prompt": "a", "echo": True}, "echo"),
        (spec("anthropic"), "openai.completion", {"prompt": "a"}, "model"),
        (spec("anthropic"), "openai.chat", {"temperature": 1.5}, "temperature"),
        (spec("anthropic"), "openai.chat", {"response_format": {"type": "json_object"}}, "response_format"),
        (spec("openai"), "openai.embedding", {"input": "a"}, "model"),
        (
            spec("openai"),
            "anthropic.messages",
            {"messages": [*HELLO, {"role": "assistant", "content": "I"}]},
            "messages",
        ),
        (
            spec("openai"),
            "openai.chat",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].type",
        ),
        (
            spec("anthropic", images=True),
            "anthropic.messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": FILE}]}]},
            "messages[0].content[0]",
        ),
        (
            spec("vllm", images=True, allow_internal=True),
            "openai.chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "https://10.0.0.1/x"}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_what_an_upstream_lacks_is_refused_by_name(
    upstream: UpstreamSpec, reader: str, fields: dict[str, Any], param: str | None
) -> None:
    if param is None:
        assert build_request_body(upstream, reader, **fields)
        return
    with pytest.raises(ApiError) as exc_info:
        prompt_of(upstream, reader, **fields)
    assert (exc_info.value.status, exc_info.value.param) == (400, param)


def test_the_bound_covers_every_byte_and_image_and_leaves_room_for_the_answer() -> None:
    text = "\N{GRINNING FACE}" * 200  # more tokens than characters
    prompt = prompt_of(spec("openai"), messages=[{"role": "user", "content": text}], max_tokens=50)
    assert prompt.num_tokens >= len(text.encode())
    assert prompt.expected_tokens < prompt.num_tokens
    many = prompt_of(spec("openai"), messages=[{"role": "user", "content": "a" * 50_000}], max_tokens=500)
    assert many.num_tokens == 10_000 - 500, "the upstream's context bounds the prompt"
    image = prompt_of(spec("openai", images=True), messages=[{"role": "user", "content": [IMAGE]}], max_tokens=50)
    assert PRESETS["openai"].image_tokens <= image.num_tokens < PRESETS["openai"].image_tokens + 1000


def test_breakpoints_are_sent_to_anthropic() -> None:
    part = {"type": "text", "text": "Hello", "prompt_cache_breakpoint": {"mode": "explicit"}}
    body = build_request_body(
        spec("anthropic"), messages=[{"role": "user", "content": [part, {"type": "text", "text": " you"}]}]
    )
    assert body["messages"][0]["content"] == [
        {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": " you"},
    ]


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match="Use one of"):
        preset_of(UpstreamSpec(UpstreamEngine.OPENAI, URL, "m", "anthropic"))
