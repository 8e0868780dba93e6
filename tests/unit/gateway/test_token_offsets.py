"""Offsets of tokens in the text of a completion, after special tokens and tokens of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.request import SamplingParams, TokenCounts, TokenLogprobs
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.protocols.openai.writer import ChatWriter, CompletionWriter, OpenAIWriter
from tests.support.engine.tiny_tokenizer import EOS, write_pieces, write_tokenizer

WRITERS: dict[str, Callable[[Path], None]] = {
    "bytes": lambda directory: write_tokenizer(directory, ["<plain>", "<special>"]),
    "as llama 2": write_pieces,
    "as gemma": lambda directory: write_pieces(directory, adds_prefix=False),
}


@pytest.fixture(scope="module", params=WRITERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    WRITERS[request.param](directory)
    return Tokenizer.from_dir(directory)


def events_of(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], *, shows_special: bool = False
) -> list[AnswerEvent]:
    """Return the events of an output with the log-probabilities of the prompt and the output."""
    params = SamplingParams(skip_special_tokens=not shows_special)
    text = tokenizer.detokenizer(params, continues=tokenizer.is_continued(prompt))
    scores = [TokenLogprobs(token, -1.0, 1, ((token, -1.0),)) for token in [*prompt, *output]]
    events: list[AnswerEvent] = []
    for number, token in enumerate(output):
        written = text.push(token) + (text.flush() if number == len(output) - 1 else "")
        more: dict[str, Any] = {} if number else {"prompt_logprobs": scores[1 : len(prompt)]}
        events.append(Tokens("r", 1, number, [token], written, logprobs=[scores[len(prompt) + number]], **more))
    return [*events, End("r", 1, len(output), "stop", None, TokenCounts(len(prompt), output=len(output)))]


def spec_of(tokenizer: Tokenizer, prompt: list[int], **fields: Any) -> ResponseSpec:
    return ResponseSpec("d", "req_1", "m", 123, len(prompt), last_prompt_ids=[prompt[-1]], **fields)


def check(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, is_echo: bool, shows_special: bool) -> None:
    """Check that each token is at its place in the text, also in a stream."""
    spec = spec_of(tokenizer, prompt, echo=[prompt] if is_echo else None, shows_special_tokens=shows_special)
    events = events_of(tokenizer, prompt, output, shows_special=shows_special)
    choice = CompletionWriter(spec, tokenizer).build_response(events)["choices"][0]
    text, scores = choice["text"], choice["logprobs"]
    ids = [*prompt, *output] if is_echo else output
    assert len(scores["text_offset"]) == len(scores["tokens"]) == len(ids)
    assert scores["text_offset"] == sorted(scores["text_offset"])
    for token_id, token, offset in zip(ids, scores["tokens"], scores["text_offset"], strict=True):
        if shows_special or tokenizer.is_continued([token_id]):
            assert token.startswith("bytes:") or text[offset:].startswith(token)
    names = [token for token_id, token in zip(ids, scores["tokens"], strict=True) if tokenizer.is_continued([token_id])]
    if not shows_special and not any(name.startswith("bytes:") for name in names):
        assert "".join(names) == text
    chunks = streamed(CompletionWriter(spec, tokenizer), events)
    assert "".join(chunk["text"] for chunk in chunks) == text
    parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    assert {name: [each for part in parts for each in part[name]] for name in scores} == scores


def streamed(writer: OpenAIWriter, events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
    datas = [data for event in events for data in writer.stream(event)]
    return [msgspec.json.decode(data)["choices"][0] for data in datas[:-1]]


SPECIAL = [EOS, "<special>", "<s>", "</s>", "<unk>"]
_part = st.sampled_from([" ", "a", "b", "ab", "é", "漢", "👍", "\n", *SPECIAL, "<plain>"])


def ids_of(tokenizer: Tokenizer, parts: list[str]) -> list[int]:
    return tokenizer.encode("".join(parts), add_special_tokens=False)


@given(st.lists(_part, min_size=1, max_size=6), st.lists(_part, min_size=1, max_size=6), st.booleans(), st.booleans())
def test_each_token_is_at_its_offset(
    tokenizer: Tokenizer, prompt: list[str], output: list[str], is_echo: bool, shows_special: bool
) -> None:
    check(
        tokenizer,
        ids_of(tokenizer, prompt),
        ids_of(tokenizer, output),
        is_echo=is_echo,
        shows_special=shows_special,
    )


def test_each_prompts_completions_are_spelled_after_its_own_last_token(tmp_path: Path) -> None:
    write_pieces(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    word = tokenizer.encode("a b", add_special_tokens=False)[-1:]
    prompts = [[tokenizer.encode("x", add_special_tokens=False)[-1]], []]
    scores = [TokenLogprobs(token, -1.0, 1, ((token, -1.0),)) for token in word]
    last_ids = [ids[-1] if ids else None for ids in prompts]
    spec = ResponseSpec("d", "req_1", "m", 123, 1, n=2, prompts=2, last_prompt_ids=last_ids)
    texts = [tokenizer.detokenizer(SamplingParams(), continues=bool(prompts[index // 2])) for index in range(4)]
    written = [text.push(word[0]) + text.flush() for text in texts]
    events: list[AnswerEvent] = [
        Tokens("r", 1, number, word, text, index=number, logprobs=scores) for number, text in enumerate(written)
    ]
    end = End("r", 1, 4, "stop", None, TokenCounts(1, output=4))
    choices = CompletionWriter(spec, tokenizer).build_response([*events, end])["choices"]
    assert [choice["logprobs"]["tokens"][0] for choice in choices] == written == [" b", " b", "b", "b"]


def test_offsets_after_a_special_token_and_a_character_of_several_tokens(tokenizer: Tokenizer) -> None:
    special = tokenizer.encode(EOS if tokenizer.is_byte_level else "</s>", add_special_tokens=False)[-1]
    emoji = tokenizer.encode("a👍", add_special_tokens=False)[-4:]
    a, b = (tokenizer.encode(f"x{each}", add_special_tokens=False)[-1] for each in "ab")
    spec = spec_of(tokenizer, [a])
    events = events_of(tokenizer, [a], [b, special, *emoji, special, a, b])
    choice = CompletionWriter(spec, tokenizer).build_response(events)["choices"][0]
    assert choice["text"] == "b👍ab"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 1, 2, 2, 3]
    assert choice["logprobs"]["tokens"][2:6] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x91", "bytes:\\x8d"]


def test_the_tokens_of_a_chat_are_its_text(tokenizer: Tokenizer) -> None:
    """The bytes of the tokens, joined, are the answer's text."""
    special = tokenizer.encode(EOS if tokenizer.is_byte_level else "</s>", add_special_tokens=False)[-1]
    output = tokenizer.encode("a 👍 b", add_special_tokens=False)
    for prompt in ([special], tokenizer.encode("b", add_special_tokens=False)):
        events = events_of(tokenizer, prompt, output)
        choice = ChatWriter(spec_of(tokenizer, prompt), tokenizer).build_response(events)["choices"][0]
        entries = choice["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
        assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)
