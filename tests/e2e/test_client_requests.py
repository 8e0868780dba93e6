"""Requests as real clients send them: their headers, URLs, encodings and fields, through a whole platform."""

from __future__ import annotations

import codecs
import gzip
import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import zstandard

from tests.support.stack import EMBEDDING_MODEL, MODEL, Stack, eventually

HELLO = [{"role": "user", "content": "Hello"}]


def post(stack: Stack, path: str = "/v1/chat/completions", **fields: Any) -> httpx2.Response:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, **fields}
    return httpx2.post(f"{stack.url}{path}", json=body, headers=stack.headers, timeout=60)


def set_mode(stack: Stack, mode: str) -> None:
    body = {"unknown_parameters": mode}
    response = httpx2.patch(f"{stack.url}/api/tenant", json=body, headers=stack.headers, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["unknown_parameters"] == mode


def test_ignored_fields_are_named_in_the_header_and_the_record(stack: Stack) -> None:
    named = "store, messages[].mood, flavor"
    response = post(stack, messages=[{**HELLO[0], "mood": "good"}], flavor=1, store=True)
    assert response.status_code == 200
    assert set(response.headers["x-millrace-ignored"].split(", ")) == set(named.split(", "))
    assert "x-millrace-ignored" not in post(stack).headers
    long = post(stack, messages=[{**HELLO[0], "mood": "good " * 2000}])  # read by a prompt process
    assert long.headers["x-millrace-ignored"] == "messages[].mood"
    url = f"{stack.url}/api/requests/{response.headers['x-request-id']}"
    eventually(lambda: httpx2.get(url, headers=stack.headers, timeout=60).json()["record"])
    record = httpx2.get(url, headers=stack.headers, timeout=60).json()["record"]
    assert set(record["ignored"]) == set(named.split(", "))


def test_a_tenant_can_reject_unknown_fields(stack: Stack) -> None:
    set_mode(stack, "reject")
    try:
        eventually(lambda: post(stack, flavor=1).status_code == 400)
        error = post(stack, flavor=1, padding="x" * 5000).json()["error"]  # read by a prompt process
        assert (error["code"], error["param"]) == ("unknown_parameter", "flavor")
        assert post(stack, store=True).status_code == 200
    finally:
        set_mode(stack, "default")
    eventually(lambda: post(stack, flavor=1).status_code == 200)


def test_a_typo_is_refused(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as exc_info:
        stack.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_body={"max_completion_token": 5}
        )
    assert exc_info.value.param == "max_completion_token"


def request(stack: Stack, method: str, path: str, **headers: str) -> httpx2.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.request(method, f"{stack.url}{path}", headers={**stack.headers, **names}, timeout=60)


def test_models_in_anthropics_format(stack: Stack) -> None:
    client = anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0)
    models = list(client.models.list())
    assert MODEL in [model.id for model in models]
    assert client.models.retrieve(MODEL).type == "model"
    with pytest.raises(anthropic.NotFoundError) as exc_info:
        client.models.retrieve("nothing")
    body: Any = exc_info.value.body
    assert body["error"]["type"] == "not_found_error"
    assert stack.client().models.retrieve(MODEL).object == "model"


def test_401_and_404_are_in_the_dialect_of_the_path(stack: Stack) -> None:
    for path in ("/v1/messages", "/v1/messages/nowhere"):
        body = httpx2.post(f"{stack.url}{path}", json={}, timeout=60).json()
        assert body["type"] == "error", path
    body = httpx2.get(f"{stack.url}/v1/models", headers={"anthropic-version": "2023-06-01"}, timeout=60).json()
    assert body["error"]["type"] == "authentication_error"
    assert set(httpx2.get(f"{stack.url}/v1/nowhere", timeout=60).json()["error"]) >= {"message", "code"}


def test_head_trailing_slashes_and_allow(stack: Stack) -> None:
    head = request(stack, "HEAD", "/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert request(stack, "GET", "/v1/models/").json() == request(stack, "GET", "/v1/models").json()
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/batches", "POST, GET, HEAD"),
    ):
        response = request(stack, method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


def test_azures_paths_and_key(stack: Stack) -> None:
    client = openai.AzureOpenAI(
        azure_endpoint=stack.url, api_version="2024-10-21", api_key=stack.key, azure_deployment=MODEL, max_retries=0
    )
    answer = client.chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=2
    )
    assert answer.model == MODEL
    headers = {"api-key": stack.key}
    body = {"messages": HELLO, "max_tokens": 2}
    url = f"{stack.url}/openai/deployments/{MODEL}/chat/completions?api-version=1"
    assert httpx2.post(url, json=body, headers=headers, timeout=60).json()["model"] == MODEL
    models = httpx2.get(f"{stack.url}/openai/v1/models", headers=headers, timeout=60).json()
    assert MODEL in [model["id"] for model in models["data"]]


def set_origins(stack: Stack, *origins: str) -> None:
    body = {"allowed_origins": origins}
    response = httpx2.patch(f"{stack.url}/api/tenant", json=body, headers=stack.headers, timeout=60)
    assert response.status_code == 200, response.text


def test_pages_of_allowed_origins_can_call_the_api(stack: Stack) -> None:
    origin = "https://app.example"
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization, x-stainless-os"}
    set_origins(stack, origin)
    try:
        eventually(lambda: "access-control-allow-origin" in request(stack, "GET", "/v1/models", origin=origin).headers)
        url = f"{stack.url}/v1/chat/completions"
        headers = {"origin": origin, **{name.replace("_", "-"): value for name, value in asked.items()}}
        eventually(lambda: "access-control-allow-origin" in httpx2.options(url, headers=headers, timeout=60).headers)
        preflight = httpx2.options(url, headers=headers, timeout=60)  # without a key
        assert (preflight.status_code, preflight.content) == (204, b"")
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-headers"] == asked["access_control_request_headers"]
        response = request(stack, "GET", "/v1/models", origin=origin)
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "content-length"} <= set(exposed)
        assert {name for name in response.headers if name.startswith(("x-", "openai-"))} <= set(exposed)
        body = {"model": EMBEDDING_MODEL, "input": "word " * 300}
        embedded = httpx2.post(
            f"{stack.url}/v1/embeddings", json=body, headers={**stack.headers, "origin": origin}, timeout=60
        )
        assert embedded.headers["x-millrace-truncated"] == "1 of 1"
        assert "x-millrace-truncated" in embedded.headers["access-control-expose-headers"].split(", ")
        assert "access-control-allow-credentials" not in {*response.headers, *preflight.headers}
        for other in ("https://evil.example", "null"):
            assert "access-control-allow-origin" not in request(stack, "GET", "/v1/models", origin=other).headers
            denied = httpx2.options(url, headers={**headers, "origin": other}, timeout=60)
            assert "access-control-allow-origin" not in denied.headers
        for given, allowed in ((origin, origin), ("https://evil.example", None)):
            headers = {"origin": given, "x-api-key": "x"}
            wrong_key = httpx2.get(f"{stack.url}/v1/models", headers=headers, timeout=60)
            assert wrong_key.status_code == 401
            assert wrong_key.headers.get("access-control-allow-origin") == allowed
    finally:
        set_origins(stack)
    body = {"allowed_origins": ["app.example"]}
    refused = httpx2.patch(f"{stack.url}/api/tenant", json=body, headers=stack.headers, timeout=60)
    assert refused.status_code == 400


def test_compressed_bodies_and_responses(stack: Stack) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello " * 500}], "max_tokens": 2, "padding": "x"}
    headers = {**stack.headers, "content-encoding": "gzip", "content-type": "application/json"}
    url = f"{stack.url}/v1/chat/completions"
    for content in (body, {**body, "messages": HELLO}):
        response = httpx2.post(url, content=gzip.compress(json.dumps(content).encode()), headers=headers, timeout=60)
        assert response.status_code == 200, response.text
    bomb = gzip.compress(b"\0" * 2**26)
    assert httpx2.post(url, content=bomb, headers=headers, timeout=60).status_code == 413
    assert httpx2.post(url, content=bomb, headers={**headers, "authorization": "x"}, timeout=60).status_code == 401
    by_zstd = {**headers, "content-encoding": "zstd"}
    assert (
        httpx2.post(url, content=zstandard.compress(json.dumps(body).encode()), headers=by_zstd, timeout=60).status_code
        == 200
    )
    assert httpx2.post(url, content=zstandard.compress(b"\0" * 2**26), headers=by_zstd, timeout=60).status_code == 413
    other = httpx2.post(url, content=b"x", headers={**headers, "content-encoding": "br"}, timeout=60)
    assert other.status_code == 415
    vectors = {"model": EMBEDDING_MODEL, "input": "Hello"}
    for encoding, used in (("gzip, deflate", "gzip"), ("gzip, zstd", "zstd"), ("identity", None)):
        named = {**stack.headers, "accept-encoding": encoding}
        answer = httpx2.post(f"{stack.url}/v1/embeddings", json=vectors, headers=named, timeout=60)
        assert answer.headers.get("content-encoding") == used
        decompress = zstandard.ZstdDecompressor().decompressobj().decompress  # httpx2 decodes only the others
        text = decompress(answer.content) if used == "zstd" else answer.content
        assert len(json.loads(text)["data"][0]["embedding"]) == 384


def test_a_byte_order_mark_is_ignored(stack: Stack) -> None:
    body = codecs.BOM_UTF8 + json.dumps({"model": MODEL, "messages": HELLO, "max_tokens": 1}).encode()
    headers = {**stack.headers, "content-type": "application/json"}
    url = f"{stack.url}/v1/chat/completions"
    for content, more in (
        (body, {}),
        (gzip.compress(body[:2]) + gzip.compress(body[2:]), {"content-encoding": "gzip"}),
    ):
        response = httpx2.post(url, content=content, headers=headers | more, timeout=60)
        assert response.status_code == 200, response.text
    name = json.dumps({"name": "Marked"}).encode()
    created = httpx2.post(f"{stack.url}/api/projects", content=codecs.BOM_UTF8 + name, headers=headers, timeout=60)
    assert created.status_code == 201, created.text


def test_tokenization_as_in_vllm(stack: Stack) -> None:
    def call(path: str, **body: Any) -> Any:
        return httpx2.post(f"{stack.url}{path}", json={"model": MODEL, **body}, headers=stack.headers, timeout=60)

    text = "Hello, world"
    made = call("/tokenize", prompt=text, return_token_strs=True).json()
    assert (made["count"], "".join(made["token_strs"])) == (len(made["tokens"]), text)
    assert call("/detokenize", tokens=made["tokens"]).json() == {"prompt": text}
    for path, body in (("/tokenize", {"prompt": text}), ("/detokenize", {"tokens": made["tokens"]})):  # as lm-eval
        found = httpx2.post(f"{stack.url}{path}", json=body, headers=stack.headers, timeout=60).json()
        assert found == call(path, **body).json()
    empty = httpx2.post(f"{stack.url}/tokenize", json={}, headers=stack.headers, timeout=60).json()
    assert empty["error"]["param"] == "prompt"
    long = call("/tokenize", prompt=text * 1000).json()  # read by a prompt process
    assert long["count"] > 1000
    chat = call("/tokenize", messages=HELLO).json()
    assert chat["count"] > call("/tokenize", messages=HELLO, add_generation_prompt=False).json()["count"]
    assert call("/tokenize").json()["error"]["param"] == "prompt"
    assert call("/detokenize", tokens=[2**40]).json()["error"]["param"] == "tokens"
    length = made["max_model_len"]
    assert call("/detokenize", tokens=[0] * (length + 1)).json()["error"]["param"] == "tokens"
    many = call("/tokenize", prompt="a " * (length + 1), return_token_strs=True)
    assert many.json()["error"]["param"] == "return_token_strs"
    info = httpx2.get(f"{stack.url}/tokenizer_info", headers=stack.headers, timeout=60).json()
    assert {"chat_template", "eos_token"} <= info.keys()
    assert httpx2.post(f"{stack.url}/tokenize", json={"model": MODEL, "prompt": "x"}, timeout=60).status_code == 401


def test_an_idempotency_key_belongs_to_the_deployment_of_azures_path(stack: Stack) -> None:
    headers = {**stack.headers, "idempotency-key": "azure-1"}

    def call(deployment: str) -> httpx2.Response:
        url = f"{stack.url}/openai/deployments/{deployment}/chat/completions"
        return httpx2.post(url, json={"messages": HELLO, "max_tokens": 1}, headers=headers, timeout=60)

    first = call(MODEL)
    assert first.status_code == 200, first.text
    assert call(MODEL).json() == first.json()
    assert call("another").status_code == 409


def test_the_last_message_of_the_assistant_is_continued(stack: Stack) -> None:
    client = anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0)
    turns: Any = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "1, 2, 3,"}]
    answer = client.messages.create(model=MODEL, max_tokens=4, messages=turns, extra_body={"temperature": 0})
    continued = post(
        stack, messages=turns, max_tokens=4, temperature=0, continue_final_message=True, add_generation_prompt=False
    ).json()
    assert answer.content[0].text == continued["choices"][0]["message"]["content"]  # type: ignore[union-attr]
    assert answer.content[0].text.strip().startswith("4")  # type: ignore[union-attr]
    choice = post(stack, guided_choice=["yes", "no"], max_tokens=9).json()["choices"][0]
    assert choice["message"]["content"] in ("yes", "no")
