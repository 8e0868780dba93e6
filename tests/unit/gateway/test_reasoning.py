"""Reasoning in the three dialects: parameters, prompts, responses, and reasoning that clients send back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic.types
import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.request import ReasoningSpec, TokenCounts, TokenLogprobs
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, ReasoningOptions, ResponseSpec
from millrace.gateway.protocols.anthropic.messages import read_count, read_messages
from millrace.gateway.protocols.anthropic.writer import MessagesWriter
from millrace.gateway.protocols.openai.chat import read_chat
from millrace.gateway.protocols.openai.writer import ChatWriter
from millrace.gateway.protocols.prompts import tokenize_here
from millrace.gateway.protocols.responses.body import read_response
from millrace.gateway.protocols.responses.writer import ResponsesWriter
from tests.support.engine.tiny_tokenizer import write_tokenizer

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
OPENS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: <think>\n"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> InferenceRequest:
    return read_chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def messages(**fields: Any) -> InferenceRequest:
    return read_messages(json.dumps({"model": "m", "messages": HELLO, "max_tokens": 100, **fields}).encode())


def count(**fields: Any) -> InferenceRequest:
    return read_count(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def response(**fields: Any) -> InferenceRequest:
    return read_response(json.dumps({"model": "m", "input": "Hello", **fields}).encode())


@pytest.mark.parametrize(
    ("request_", "enabled", "budget", "ignored"),
    [
        (lambda: chat(), None, None, ()),
        (lambda: chat(reasoning_effort="none"), False, 0, ()),
        (lambda: chat(reasoning_effort="low"), True, 1024, ("reasoning_effort",)),
        (lambda: chat(reasoning_effort="high"), True, None, ("reasoning_effort",)),
        (lambda: chat(thinking_token_budget=5), None, 5, ("thinking_token_budget",)),
        (lambda: messages(), False, None, ()),
        (lambda: messages(thinking={"type": "disabled"}), False, 0, ()),
        (lambda: messages(thinking={"type": "enabled", "budget_tokens": 50}), True, 50, ("thinking",)),
        (lambda: messages(thinking={"type": "adaptive"}), True, None, ("thinking",)),
        (
            lambda: messages(thinking={"type": "adaptive"}, output_config={"effort": "low"}),
            *(True, 1024, ("output_config.effort", "thinking")),
        ),
        (lambda: response(reasoning={"effort": "medium", "summary": "auto"}), True, 8192, ("reasoning",)),
        (lambda: response(reasoning={"effort": "none"}), False, 0, ()),
    ],
)
def test_parameters(request_: Any, enabled: bool | None, budget: int | None, ignored: tuple[str, ...]) -> None:
    request = request_()
    assert request.reasoning == ReasoningOptions(enabled, budget, ignored, request.reasoning.effort)
    assert request.analysis.ignored == ignored  # models without reasoning ignore them


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (chat, {"reasoning_effort": "most"}, "reasoning_effort"),
        (chat, {"thinking_token_budget": -1}, "thinking_token_budget"),
        (chat, {"thinking_token_budget": 8, "max_tokens": 8}, "thinking_token_budget"),
        (chat, {"thinking_token_budget": 10**30}, "thinking_token_budget"),
        (messages, {"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        (count, {"thinking": {"type": "enabled", "budget_tokens": 10**30}}, "thinking.budget_tokens"),
        (count, {"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        (messages, {"thinking": {"type": "deep"}}, "thinking.type"),
        (response, {"reasoning": {"effort": "most"}}, "reasoning.effort"),
    ],
)
def test_errors_name_the_parameter(read: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as exc_info:
        read(**fields)
    assert (exc_info.value.status, exc_info.value.param) == (400, param)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    def make(template: str, **parsers: str) -> ServedModel:
        write_tokenizer(tmp_path, ["<think>", "</think>"], template)
        tokenizer = Tokenizer.from_dir(tmp_path, **parsers)
        return ServedModel("m", tokenizer, 10_000, tokenizer.vocab_size, 0)

    return make


def spec(model: ServedModel, request: InferenceRequest) -> ReasoningSpec | None:
    return tokenize_here(model, request).reasoning


def test_the_prompt_determines_whether_the_output_begins_in_the_reasoning(model: Any) -> None:
    qwen3 = model((TEMPLATES / "qwen3.jinja").read_text())
    assert spec(qwen3, chat()) == ReasoningSpec("qwen3")
    assert spec(qwen3, chat(reasoning_effort="low")) == ReasoningSpec("qwen3", is_requested=True, budget=1024)
    assert spec(qwen3, chat(reasoning_effort="none")) is None  # the template has ended the reasoning
    assert spec(qwen3, chat(chat_template_kwargs={"enable_thinking": False})) is None
    assert spec(qwen3, messages()) is None
    assert spec(qwen3, chat(add_generation_prompt=False)) is None
    opens = model(OPENS)
    assert spec(opens, chat()) == ReasoningSpec("think", is_open=True)
    assert spec(opens, chat(reasoning_effort="none")) == ReasoningSpec("think", is_open=True, budget=0)
    assert spec(opens, messages(thinking={"type": "disabled"})) == ReasoningSpec("think", is_open=True, budget=0)
    assert spec(model(OPENS, reasoning_parser="none"), chat()) is None
    assert spec(model("{{ messages[0].content }}"), chat(reasoning_effort="low")) is None
    granite = model((TEMPLATES / "granite3.3.jinja").read_text())
    request = chat(reasoning_effort="high")
    assert spec(granite, request) == ReasoningSpec("granite", is_requested=True)
    assert "between <think></think>" in granite.tokenizer.decode(tokenize_here(granite, request).ids)


@pytest.mark.parametrize(
    ("prefill", "wanted"),
    [("<think>Hm", ReasoningSpec("qwen3", is_open=True)), ("<think>Hm</think>Y", None), ("Y", None)],
)
def test_a_continued_message_may_be_in_the_reasoning(model: Any, prefill: str, wanted: ReasoningSpec | None) -> None:
    turns = [*HELLO, {"role": "assistant", "content": prefill}]
    request = chat(messages=turns, continue_final_message=True)
    assert spec(model((TEMPLATES / "qwen3.jinja").read_text()), request) == wanted


def test_forced_calls_need_a_parser(model: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    served = model((TEMPLATES / "qwen3.jinja").read_text(), tool_parser="none")
    assert tokenize_here(served, chat(tools=[tool])).ids
    with pytest.raises(ApiError, match="cannot be required") as exc_info:
        tokenize_here(served, chat(tools=[tool], tool_choice="required"))
    assert exc_info.value.param == "tool_choice"


# Responses.

USAGE = TokenCounts(uncached=3, output=6)
EVENTS: list[AnswerEvent] = [
    Tokens("req_1", 1, 0, [1], "", prompt=TokenCounts(uncached=3), reasoning="Hm", reasoning_tokens=1),
    Tokens("req_1", 1, 1, [2, 3], "", reasoning=", so.", reasoning_tokens=2),
    Tokens("req_1", 1, 2, [4, 5], "Yes", reasoning=" Well.", reasoning_tokens=1),
    End("req_1", 1, 3, "stop", None, USAGE),
]
REASONING = "Hm, so. Well."


def stream(writer: Any) -> list[dict[str, Any]]:
    datas = [data for event in EVENTS for data in writer.stream(event)]
    return [msgspec.json.decode(data) for data in datas if data != b"[DONE]"]


def form(**fields: Any) -> ResponseSpec:
    return ResponseSpec("d", "req_1", "m", 123, 3, **fields)


def test_chat_completions() -> None:
    whole = ChatWriter(form(), None).build_response(EVENTS)  # type: ignore[arg-type]
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (REASONING, "Yes")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    chunks = stream(ChatWriter(form(include_usage=True), None))  # type: ignore[arg-type]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == REASONING
    assert [delta["content"] for delta in deltas if delta.get("content")] == ["Yes"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_logprobs_are_those_of_the_answer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, [])
    tokenizer = Tokenizer.from_dir(tmp_path)
    ids = tokenizer.encode("AB")
    logprobs = [TokenLogprobs(token, -1.0, 1) for token in ids]
    event = Tokens("req_1", 1, 0, ids, "B", logprobs=logprobs, reasoning="A", reasoning_tokens=1)
    whole = ChatWriter(form(), tokenizer).build_response([event, EVENTS[-1]])
    assert [each["token"] for each in whole["choices"][0]["logprobs"]["content"]] == ["B"]
    chunks = [msgspec.json.decode(data) for data in ChatWriter(form(), tokenizer).stream(event)]
    assert [len(c["choices"][0]["logprobs"]["content"]) for c in chunks if c["choices"][0]["logprobs"]] == [1]


@pytest.mark.parametrize("display", [None, "omitted"])
def test_messages(display: str | None) -> None:
    spec = form(echoed_parameters={"thinking_display": display} if display else {})
    whole = MessagesWriter(spec, None).build_response(EVENTS)  # type: ignore[arg-type]
    message = anthropic.types.Message.model_validate(whole, strict=True)
    thinking, text = message.content
    assert isinstance(thinking, anthropic.types.ThinkingBlock)
    assert isinstance(text, anthropic.types.TextBlock)
    assert (thinking.thinking, text.text) == ("" if display else REASONING, "Yes")
    assert thinking.signature
    events = stream(MessagesWriter(spec, None))  # type: ignore[arg-type]
    adapter: Any = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    for event in events:
        adapter.validate_python(event)
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            (key,) = delta.keys() - {"type"}
            blocks[event["index"]][key] += delta[key]
    assert blocks == whole["content"]
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    assert events[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    # The answer can be sent back, with its thinking.
    turns = [*HELLO, {"role": "assistant", "content": whole["content"]}, *HELLO]
    sent = read_count(json.dumps({"model": "m", "messages": turns}).encode())
    assert sent.prompt[1] == {"role": "assistant", "content": "Yes", "reasoning_content": thinking.thinking}


def test_responses() -> None:
    spec = form(echoed_parameters=response(reasoning={"effort": "low"}).echoed_parameters)
    whole = ResponsesWriter(spec, None).build_response(EVENTS)  # type: ignore[arg-type]
    Response.model_validate(whole, strict=True)
    reasoning, message = whole["output"]
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"type": "reasoning_text", "text": REASONING}])
    assert message["content"][0]["text"] == "Yes"
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    assert whole["reasoning"]["effort"] == "low"
    events = stream(ResponsesWriter(spec, None))  # type: ignore[arg-type]
    adapter: Any = TypeAdapter(ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event)
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == REASONING
    assert events[-1]["response"]["output"] == whole["output"]
    # The output can be sent back, with its reasoning.
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    sent: Any = response(input=[*HELLO, *whole["output"], *HELLO, reasoning, call]).prompt
    assert sent[1] == {"role": "assistant", "content": "Yes", "reasoning_content": REASONING}
    assert (sent[3]["reasoning_content"], len(sent[3]["tool_calls"])) == (REASONING, 1)
    assert len(response(input=[*HELLO, reasoning]).prompt) == 1
