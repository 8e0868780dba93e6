"""Reasoning through a whole platform: tiny Qwen3 models. One ends its reasoning itself, the other by its budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from openai.types.responses import ResponseOutputMessage, ResponseReasoningItem

from inference_worker.checkpoints.tokenizer import Tokenizer
from tests.support.e2e.deployments import publish_prices, run_deployments, sign_in_operator
from tests.support.engine.tiny_reasoner import write_reasoner, write_scripted_reasoner
from tests.support.stack import Stack, eventually

NAME = "tiny-reasoner"
THINKER = "tiny-thinker"
THOUGHT, ANSWER = "Hm:1+2=3.", "Yes"  # each token once
HELLO: Any = [{"role": "user", "content": "hello"}]
GREEDY: Any = {"temperature": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the two models."""
    folder = tmp_path_factory.mktemp("reasoners")
    write_reasoner(folder / NAME)
    write_scripted_reasoner(folder / THINKER, f"{THOUGHT}</think>{ANSWER}<|im_end|>")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _deployments(stack: Stack, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Deploy both models on the shared platform while the tests of this file run."""
    with pytest.MonkeyPatch.context() as patch:
        sign_in_operator(stack, tmp_path_factory.mktemp("operator"), patch)
        for name in (NAME, THINKER):
            options = ["--source", str(models / name), "--dtype", "float32", "--kv-cache-memory", "64MiB"]
            run_deployments("add", name, *options)
        publish_prices(stack, NAME, THINKER)
        for name in (NAME, THINKER):
            run_deployments("load", name, "--wait")
            eventually(partial(chat, stack, name, max_tokens=1))
        yield
        for name in (NAME, THINKER):
            run_deployments("remove", name)


@pytest.fixture(scope="module")
def end_tokens(models: Path) -> int:
    """Return the number of tokens by which the engine ends the reasoning."""
    tokenizer = Tokenizer.from_dir(models / NAME)
    return len(tokenizer.encode("\n</think>\n\n", add_special_tokens=False))


@pytest.fixture(scope="module")
def thought_tokens(models: Path) -> int:
    """Return the number of tokens of the thinker's reasoning, with the mark that ends it."""
    return len(Tokenizer.from_dir(models / THINKER).encode(f"{THOUGHT}</think>"))


def chat(stack: Stack, model: str = NAME, **options: Any) -> Any:
    """Return the completion, or the list of a stream's chunks."""
    with stack.client() as client:
        answer = client.chat.completions.create(model=model, messages=HELLO, **{**GREEDY, **options})
        return list(answer) if options.get("stream") else answer


@pytest.mark.parametrize("budget", [None, 90])
def test_a_model_ends_its_reasoning(stack: Stack, thought_tokens: int, budget: int | None) -> None:
    extra: Any = {} if budget is None else {"thinking_token_budget": budget}
    answer = chat(stack, THINKER, max_tokens=100, extra_body=extra)
    message, usage = answer.choices[0].message, answer.usage
    assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER)
    assert (answer.choices[0].finish_reason, usage.completion_tokens_details.reasoning_tokens) == (
        "stop",
        thought_tokens,
    )
    assert usage.completion_tokens > thought_tokens

    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": extra}
    chunks = chat(stack, THINKER, max_tokens=100, **options)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    parts = [(getattr(delta, "reasoning_content", None) or "", delta.content or "") for delta in deltas]
    assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (THOUGHT, ANSWER)
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == thought_tokens


def test_a_model_that_ends_its_reasoning_has_blocks_and_items(stack: Stack, thought_tokens: int) -> None:
    options: Any = {"base_url": stack.url, "api_key": stack.key, "max_retries": 0}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    body: Any = {"model": THINKER, "messages": HELLO, "max_tokens": 1200, "extra_body": GREEDY}
    with anthropic.Anthropic(**options) as client:
        found: Any = client.messages.create(thinking=thinking, **body)
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert (found.content[0].thinking, found.content[1].text, found.stop_reason) == (THOUGHT, ANSWER, "end_turn")
    with stack.client() as client:
        response: Any = client.responses.create(model=THINKER, input="hello", max_output_tokens=100, **GREEDY)
    reasoning, message = response.output
    assert (reasoning.content[0].text, message.content[0].text, response.status) == (THOUGHT, ANSWER, "completed")
    assert response.usage.output_tokens_details.reasoning_tokens == thought_tokens


def test_a_grammar_begins_where_a_model_ends_its_reasoning(stack: Stack, thought_tokens: int) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}},
    }
    answer = chat(stack, THINKER, max_tokens=80, response_format=form)
    message = answer.choices[0].message
    assert message.reasoning_content == THOUGHT
    assert isinstance(json.loads(message.content)["ok"], bool)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens_details.reasoning_tokens == thought_tokens


def test_a_budget_ends_the_reasoning_of_a_chat_completion(stack: Stack, end_tokens: int) -> None:
    answer = chat(stack, max_tokens=60, extra_body={"thinking_token_budget": 20})
    message = answer.choices[0].message
    usage = answer.usage
    assert message.reasoning_content and message.content
    assert "think" not in message.reasoning_content + message.content
    assert usage.completion_tokens_details.reasoning_tokens == 20 + end_tokens
    assert (usage.completion_tokens, answer.choices[0].finish_reason) == (60, "length")

    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = chat(stack, max_tokens=60, extra_body={"thinking_token_budget": 20}, **options)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    parts = [(getattr(delta, "reasoning_content", None) or "", delta.content or "") for delta in deltas]
    assert "".join(part[0] for part in parts) == message.reasoning_content
    assert "".join(part[1] for part in parts) == message.content
    first_answer = next(number for number, part in enumerate(parts) if part[1])
    assert not any(part[0] for part in parts[first_answer:])
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 20 + end_tokens


def test_efforts_are_budgets(stack: Stack, end_tokens: int) -> None:
    minimal = chat(stack, max_tokens=600, reasoning_effort="minimal")
    assert minimal.usage.completion_tokens_details.reasoning_tokens == 512 + end_tokens
    assert minimal.choices[0].message.content
    none = chat(stack, max_tokens=20, reasoning_effort="none")
    assert none.usage.completion_tokens_details.reasoning_tokens == 0
    assert getattr(none.choices[0].message, "reasoning_content", None) in (None, "")
    assert none.choices[0].message.content
    high = chat(stack, max_tokens=20, reasoning_effort="high")
    assert high.usage.completion_tokens_details.reasoning_tokens == 20  # without a budget, all of the output
    assert not high.choices[0].message.content


def test_messages_have_thinking_blocks(stack: Stack) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 16}
    options: Any = {"base_url": stack.url, "api_key": stack.key, "max_retries": 0}
    body: Any = {"model": NAME, "messages": HELLO, "max_tokens": 40, "thinking": thinking, "extra_body": GREEDY}
    with anthropic.Anthropic(**options) as client:
        answer = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        plain = client.messages.create(**{**body, "thinking": {"type": "disabled"}})
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking and answer.content[1].text
    assert streamed.content[0].thinking == answer.content[0].thinking
    assert streamed.content[1].text == answer.content[1].text
    assert [block.type for block in plain.content] == ["text"]
    assert answer.usage.output_tokens == 40


def test_responses_have_a_reasoning_item(stack: Stack) -> None:
    body: Any = {
        "model": NAME,
        "input": "hello",
        "max_output_tokens": 600,
        "reasoning": {"effort": "minimal"},
        **GREEDY,
    }
    with stack.client() as client:
        answer = client.responses.create(**body)
        *_, done = client.responses.create(**body, stream=True)
    reasoning, message = answer.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert isinstance(message, ResponseOutputMessage)
    assert reasoning.content and reasoning.content[0].text
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 512
    assert [item.type for item in done.response.output] == ["reasoning", "message"]
    assert done.response.output[0].content[0].text == reasoning.content[0].text


def test_a_grammar_begins_after_the_reasoning(stack: Stack, end_tokens: int) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}},
    }
    answer = chat(stack, max_tokens=80, response_format=form, extra_body={"thinking_token_budget": 10})
    assert answer.choices[0].finish_reason == "stop"
    message = answer.choices[0].message
    assert isinstance(json.loads(message.content)["ok"], bool)
    assert message.reasoning_content
    # The line breaks after the mark are not part of the grammar, so they are not generated.
    assert 10 < answer.usage.completion_tokens_details.reasoning_tokens < 10 + end_tokens


def test_the_reasoning_is_billed_as_output(stack: Stack) -> None:
    body = {"model": NAME, "messages": HELLO, "max_tokens": 30, "thinking_token_budget": 10, **GREEDY}
    response = httpx2.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=60)
    assert response.status_code == 200, response.text
    event = stack.event(response.headers["x-request-id"])
    assert (event["output"], event["outcome"]) == (30, "completed")
