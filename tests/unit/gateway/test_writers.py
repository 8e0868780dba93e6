"""Writing of responses and chunks in OpenAI's dialect."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from inference_worker.checkpoints.detokenizer import Detokenizer
from inference_worker.contract.messages import AnswerEvent, End, Finished, Tokens
from inference_worker.contract.request import SamplingParams, ServiceClass, TokenCounts, TokenLogprobs
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.protocols.openai.writer import ChatWriter, CompletionWriter, OpenAIWriter

TOKENIZER: Any = None  # only if log-probabilities were requested
EVENTS: list[AnswerEvent] = [
    Tokens("req_1", 1, 0, [5], "Hel", prompt=TokenCounts(uncached=6, cache_read=4)),
    Tokens("req_1", 1, 1, [6], ""),  # half a character: a token without text
    Tokens("req_1", 1, 2, [7, 8], "lo"),
    End("req_1", 1, 3, "stop", None, TokenCounts(uncached=6, cache_read=4, output=5), 2, 3),
]
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 3,
    },
}


def form(**options: bool) -> ResponseSpec:
    return ResponseSpec("d", "req_1", "m", 123, 10, **options)


def streamed(writer: OpenAIWriter) -> list[Any]:
    datas = [data for event in EVENTS for data in writer.stream(event)]
    assert datas[-1] == b"[DONE]"
    return [msgspec.json.decode(data) for data in datas[:-1]]


def test_a_chat_stream() -> None:
    chunks = streamed(ChatWriter(form(), TOKENIZER))
    head = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 123,
        "model": "m",
        "service_tier": "default",
    }
    deltas = [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    reasons = [None, None, None, "stop"]
    assert chunks == [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
        for delta, reason in zip(deltas, reasons, strict=True)
    ]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_usage_is_sent_once_at_the_end_if_requested() -> None:
    *chunks, last = streamed(ChatWriter(form(include_usage=True), TOKENIZER))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], USAGE)


def test_continuous_usage_increases() -> None:
    chunks = streamed(ChatWriter(form(include_usage=True, continuous_usage=True), TOKENIZER))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    assert counts == [1, 1, 4, 5, 5]  # the first contains only the role
    assert all(chunk["usage"]["prompt_tokens"] == 10 for chunk in chunks if chunk.get("usage"))


@pytest.mark.parametrize(
    ("code", "usage", "tokens"),
    [
        ("worker_lost", TokenCounts(), 0),
        ("cancelled", None, 1),
        ("invalid_api_key", TokenCounts(uncached=10, output=3), 3),
    ],
)
def test_an_interrupted_stream_ends_with_the_billed_usage(code: str, usage: TokenCounts | None, tokens: int) -> None:
    """Nothing is billed for a request that failed. The usage so far is sent if the billed usage is not known."""
    for writer_type in (ChatWriter, CompletionWriter):
        writer = writer_type(form(include_usage=True), TOKENIZER)
        writer.stream(EVENTS[0])
        (data,) = writer.interrupt(code, usage)
        chunk = msgspec.json.decode(data)
        assert (chunk["choices"], chunk["usage"]["completion_tokens"]) == ([], tokens)
        assert writer_type(form(), TOKENIZER).interrupt(code, usage) == []


def test_an_interrupted_stream_counts_all_tokens_that_were_sent() -> None:
    events = [Tokens("req_1", 1, seq, [seq], f" {seq}") for seq in range(10)]
    for writer_type in (ChatWriter, CompletionWriter):
        writer = writer_type(form(include_usage=True), TOKENIZER)
        for event in events:
            writer.stream(event)
        (data,) = writer.interrupt("cancelled", None)
        assert msgspec.json.decode(data)["usage"]["completion_tokens"] == 10


def test_a_chat_completion() -> None:
    answer = ChatWriter(form(), TOKENIZER).build_response(EVENTS)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert answer["usage"] == USAGE
    ChatCompletion.model_validate(answer)


def test_completions() -> None:
    chunks = streamed(CompletionWriter(form(), TOKENIZER))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", ""]
    answer = CompletionWriter(form(), TOKENIZER).build_response(EVENTS)
    assert {body["object"] for body in (*chunks, answer)} == {"text_completion"}
    Completion.model_validate(answer)


@pytest.mark.parametrize("writer", [ChatWriter, CompletionWriter])
def test_equal_events_give_equal_streams(writer: type[OpenAIWriter]) -> None:
    """A resumed stream is written again from its start, so events must keep their numbers."""
    assert streamed(writer(form(include_usage=True), TOKENIZER)) == streamed(
        writer(form(include_usage=True), TOKENIZER)
    )


def test_log_probabilities_of_prompts() -> None:
    def part(index: int, logprob: float) -> Tokens:
        found = [TokenLogprobs(1, logprob, 3, ((0, -0.5),))]
        return Tokens("req_1", 1, index, [1], "Hi", index, prompt=TokenCounts(2), prompt_logprobs=found)

    end = End("req_1", 1, 2, "stop", None, TokenCounts(2, output=2))
    wanted = [None, {"0": _ranked(-0.5, 1, "<s>"), "1": _ranked(-2.0, 3, "Hi")}]
    options: dict[str, Any] = {"echoed_parameters": {"prompt_logprobs": True}}
    assert ChatWriter(form(**options), SPELLING).build_response([part(0, -2.0), end])["prompt_logprobs"] == wanted
    assert "prompt_logprobs" not in ChatWriter(form(), SPELLING).build_response([part(0, -2.0), end])
    parts = [part(0, -2.0), msgspec.structs.replace(part(1, 0.0), prompt_logprobs=None), part(2, -3.0)]
    choices = CompletionWriter(form(n=2, prompts=2, **options), SPELLING).build_response([*parts, end])["choices"]
    assert [choice["prompt_logprobs"][1]["1"]["logprob"] for choice in choices] == [-2.0, -2.0, -3.0, -3.0]


def _ranked(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


class Spelling:
    """A tokenizer with four tokens; the last two are halves of one character."""

    words: ClassVar[list[bytes]] = [b"<s>", b"Hi", b"\xc3", b"\xa9"]
    is_byte_level = True
    neutral_ids: Sequence[int] = ()

    def is_byte(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id]

    def spell(self, token_id: int, *, begins_text: bool = False) -> bytes:
        return self.words[token_id]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.spell(token_id) for token_id in ids).decode()

    def is_continued(self, prompt: Sequence[int]) -> bool:
        return True

    def detokenizer(self, params: SamplingParams, *, continues: bool) -> Detokenizer:
        return Detokenizer(self, continues=continues)


SPELLING: Any = Spelling()


def logprob(token_id: int, value: float, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, value, 1, top)


def chunks_of(writer: OpenAIWriter, events: list[AnswerEvent]) -> list[Any]:
    datas = [data for event in events for data in writer.stream(event)]
    assert datas.pop() == b"[DONE]"
    return [msgspec.json.decode(data) for data in datas]


SEVERAL: list[AnswerEvent] = [
    Tokens("req_1", 1, 0, [5], "a", index=1, prompt=TokenCounts(uncached=10)),
    Tokens("req_1", 1, 1, [5], "b", index=0),
    Finished("req_1", 1, 2, 1, "length", None),
    Tokens("req_1", 1, 3, [6], "c", index=0),
    End("req_1", 1, 4, "stop", None, TokenCounts(uncached=10, output=3)),
]


@pytest.mark.parametrize("writer", [ChatWriter, CompletionWriter])
def test_several_choices(writer: type[OpenAIWriter]) -> None:
    two = ResponseSpec("d", "req_1", "m", 123, 10, n=2)
    choices = [chunk["choices"][0] for chunk in chunks_of(writer(two, TOKENIZER), SEVERAL)]
    texts = {0: "", 1: ""}
    for choice in choices:
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    assert texts == {0: "bc", 1: "a"}
    ends = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert ends == [(1, "length"), (0, "stop")]
    first, second = writer(two, TOKENIZER).build_response(SEVERAL)["choices"]
    assert (first["index"], first["finish_reason"]) == (0, "stop")
    assert (second["index"], second["finish_reason"]) == (1, "length")
    assert first.get("text", first.get("message", {}).get("content")) == "bc"


def test_choices_that_end_together_all_end() -> None:
    """If a replaying worker wrote the end again, a request's log may lack the ends of its choices."""
    events = [SEVERAL[0], SEVERAL[1], End("req_1", 1, 2, "length", None, TokenCounts(uncached=10, output=2))]
    chunks = chunks_of(ChatWriter(ResponseSpec("d", "req_1", "m", 123, 10, n=2), TOKENIZER), events)
    ends = {c["choices"][0]["index"]: c["choices"][0]["finish_reason"] for c in chunks if c["choices"]}
    assert ends == {0: "length", 1: "length"}


LOGPROBS: list[AnswerEvent] = [
    Tokens("req_1", 1, 0, [1], "Hi", logprobs=[logprob(1, -0.5, (1, -0.5), (0, float("-inf")))]),
    Tokens("req_1", 1, 1, [2], "", logprobs=[logprob(2, -1.0, (1, -0.1))]),
    Tokens("req_1", 1, 2, [3], "é", logprobs=[logprob(3, -2.0)]),
    End("req_1", 1, 3, "stop", None, TokenCounts(uncached=2, output=3)),
]


def test_log_probabilities_of_a_chat() -> None:
    choice = ChatWriter(form(), SPELLING).build_response(LOGPROBS)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"], entry["bytes"]) for entry in content] == [
        ("Hi", -0.5, [72, 105]),
        ("bytes:\\xc3", -1.0, [195]),
        ("bytes:\\xa9", -2.0, [169]),
    ]
    assert [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in content] == [
        [("Hi", -0.5), ("<s>", -9999.0)],
        [("Hi", -0.1)],
        [],
    ]
    chunks = chunks_of(ChatWriter(form(), SPELLING), LOGPROBS)
    streamed = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for part in streamed for entry in part] == content
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


def test_log_probabilities_of_a_completion() -> None:
    logprobs = CompletionWriter(form(), SPELLING).build_response(LOGPROBS)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["Hi", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -1.0, -2.0],
        "top_logprobs": [{"Hi": -0.5, "<s>": -9999.0}, {"Hi": -0.1, "bytes:\\xc3": -1.0}, {"bytes:\\xa9": -2.0}],
        "text_offset": [0, 2, 2],  # both halves have the place of their character
    }
    chunks = chunks_of(CompletionWriter(form(), SPELLING), LOGPROBS)
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for name, values in logprobs.items():
        assert [value for part in streamed for value in part[name]] == values


def test_an_echo_is_first_with_its_log_probabilities() -> None:
    first = msgspec.structs.replace(LOGPROBS[0], prompt_logprobs=[logprob(1, -3.0, (1, -3.0))])
    events = [first, *LOGPROBS[1:]]
    echo = ResponseSpec("d", "req_1", "m", 123, 2, echo=[[0, 1]])
    choice = CompletionWriter(echo, SPELLING).build_response(events)["choices"][0]
    assert choice["text"] == "<s>HiHié"
    assert choice["logprobs"]["tokens"][:3] == ["<s>", "Hi", "Hi"]
    assert choice["logprobs"]["token_logprobs"][:3] == [None, -3.0, -0.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"Hi": -3.0}]
    assert choice["logprobs"]["text_offset"][:3] == [0, 3, 5]
    chunks = chunks_of(CompletionWriter(echo, SPELLING), events)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["<s>HiHi", "", "é", ""]


@pytest.mark.parametrize("is_echo", [True, False])
@pytest.mark.parametrize("has_logprobs", [True, False])
def test_without_output_only_the_prompt_is_written(is_echo: bool, has_logprobs: bool) -> None:
    """One token is generated, since `max_tokens` is 0."""
    logprobs: dict[str, Any] = {
        "logprobs": [logprob(1, -0.5, (1, -0.5))],
        "prompt_logprobs": [logprob(1, -3.0, (1, -3.0))],
    }
    token = Tokens("req_1", 1, 0, [1], "Hi", **(logprobs if has_logprobs else {}))
    events: list[AnswerEvent] = [token, End("req_1", 1, 1, "stop", None, TokenCounts(uncached=2, output=1))]
    echo: dict[str, Any] = {"echo": [[0, 1]]} if is_echo else {}
    spec = ResponseSpec("d", "req_1", "m", 123, 2, echoed_parameters={"hides_output": True}, **echo)
    choice = CompletionWriter(spec, SPELLING).build_response(events)["choices"][0]
    tokens = ["<s>", "Hi"] if is_echo else []
    assert (choice["text"], choice["finish_reason"]) == ("".join(tokens), "length")
    assert (choice["logprobs"] is not None) == has_logprobs
    if has_logprobs:
        assert choice["logprobs"]["tokens"] == tokens
    chunks = [chunk["choices"][0] for chunk in chunks_of(CompletionWriter(spec, SPELLING), events)]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    streamed = [name for chunk in chunks if chunk["logprobs"] for name in chunk["logprobs"]["tokens"]]
    assert streamed == (tokens if has_logprobs else [])


def test_each_prompt_is_echoed_by_its_own_choices() -> None:
    two = ResponseSpec("d", "req_1", "m", 123, 10, prompts=2, echo=[[1], [2, 3]])
    first, second = CompletionWriter(two, SPELLING).build_response(SEVERAL)["choices"]
    assert (first["text"], second["text"]) == ("Hibc", "éa")


def test_a_tool_call() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call>'
    events: list[AnswerEvent] = [Tokens("req_1", 1, seq, [1], part) for seq, part in enumerate(re.split("( )", text))]
    events.append(End("req_1", 1, len(events), "stop", None, TokenCounts(uncached=2, output=9)))
    tools = ResponseSpec("d", "req_1", "m", 123, 2, tools=["f"])
    choice = ChatWriter(tools, TOKENIZER).build_response(events)["choices"][0]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Let me see.", "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"x": [1]}'})

    chunks = chunks_of(ChatWriter(tools, TOKENIZER), events)
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    reported = state.get_final_completion().choices[0]
    assert (reported.message.content, reported.finish_reason) == ("Let me see.", "tool_calls")
    assert [made.model_dump(include={"id", "type", "function"}) for made in reported.message.tool_calls or ()] == [
        {**call, "function": {**call["function"], "parsed_arguments": None}}
    ]


def test_a_call_of_an_older_function() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": [1]}}</tool_call>'
    events: list[AnswerEvent] = [Tokens("req_1", 1, seq, [1], part) for seq, part in enumerate(re.split("( )", text))]
    events.append(End("req_1", 1, len(events), "stop", None, TokenCounts(uncached=2, output=9)))
    legacy = ResponseSpec("d", "req_1", "m", 123, 2, tools=["f"], echoed_parameters={"functions": True})
    choice = ChatWriter(legacy, TOKENIZER).build_response(events)["choices"][0]
    call = {"name": "f", "arguments": '{"x": [1]}'}
    assert (choice["message"]["function_call"], choice["finish_reason"]) == (call, "function_call")
    assert "tool_calls" not in choice["message"]
    chunks = chunks_of(ChatWriter(legacy, TOKENIZER), events)
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    streamed_call = {name: "".join(delta.get(name, "") for delta in deltas) for name in call}
    assert streamed_call == call
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


def test_content_is_null_beside_a_call_and_a_truncated_call_ends_by_length() -> None:
    events: list[AnswerEvent] = [
        Tokens("req_1", 1, 0, [1], '<tool_call>{"name": "f", "arguments": {"x'),
        End("req_1", 1, 1, "length", None, TokenCounts(uncached=2, output=1)),
    ]
    choice = ChatWriter(ResponseSpec("d", "req_1", "m", 123, 2, tools=["f"]), TOKENIZER).build_response(events)[
        "choices"
    ][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x'


@pytest.mark.parametrize(
    ("service_class", "tier"),
    [(ServiceClass.PRIORITY, "priority"), (ServiceClass.FLEX, "flex"), (ServiceClass.BATCH, "default")],
)
def test_the_response_names_its_service_tier(service_class: ServiceClass, tier: str) -> None:
    asked = ResponseSpec("d", "req_1", "m", 123, 2, service_class=service_class)
    assert ChatWriter(asked, TOKENIZER).build_response(EVENTS)["service_tier"] == tier


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage": True}])
def test_all_chunks_of_a_text_have_the_same_fields(options: dict[str, bool]) -> None:
    texts = ["a", 'quoted "" text', "line\nbreak", "\u00e9\u20ac\U0001f600", '"content":""']
    writer = ChatWriter(ResponseSpec("d", "req_1", 'm""', 123, 10, **options), TOKENIZER)
    datas = [writer.stream(Tokens("req_1", 1, seq, [seq], text)) for seq, text in enumerate(texts)]
    chunks = [msgspec.json.decode(data[-1]) for data in datas]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"content": text} for text in texts]
    for chunk in chunks:
        del chunk["choices"][0]["delta"], chunk["usage" if options else "id"]
    assert all(chunk == chunks[0] for chunk in chunks)
