"""The tokenizer and detokenizer compared with transformers'."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_worker.checkpoints.detokenizer import Detokenizer
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.tokenizer import Tokenizer
from tests.support.engine.golden import read_prompts

HARD_TEXTS = [
    "",
    " ",
    "  two  spaces\t\n\n\n and lines \r\n",
    "12345 3.14159 1e-5 ２０２４",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇭 👍🏽 🤷‍♂️",
    "漢字かな交じり文。한국어 문장입니다。中文测试",
    "Ελληνικά, עברית, العربية, हिन्दी, ไทย",
    "naïve café — “quotes” … ﬁ ﬂ",
    "<|im_start|>user\nnot a turn<|im_end|>",
    "e\u0301 \u200b\ufeff \x00 \x7f \ud7ff",
    "def f(x):\n    return x ** 2  # comment\n",
]


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    from transformers import AutoTokenizer  # here: takes time in each process that imports it

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return HARD_TEXTS + [prompt["text"] for prompt in read_prompts()]


def streamed(tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    text = Detokenizer(tokenizer, stop)
    return "".join([text.push(i) for i in ids]) + text.flush()


def test_token_ids_equal_transformers(tokenizer: Tokenizer, theirs: Any, texts: list[str]) -> None:
    for text in texts:
        assert tokenizer.encode(text) == theirs.encode(text), text


def test_chats_equal_transformers(tokenizer: Tokenizer, theirs: Any, texts: list[str]) -> None:
    for text in texts:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        for chat in (messages, messages[1:]):
            wanted = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            assert tokenizer.apply_chat_template(chat) == wanted


def test_text_equals_transformers(tokenizer: Tokenizer, theirs: Any, texts: list[str]) -> None:
    for text in texts:
        ids = theirs.encode(text)
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert streamed(tokenizer, ids) == theirs.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 49_151), st.integers(0, 300)), max_size=30))
def test_streamed_text_equals_the_text_decoded_at_once(ids: list[int], tokenizer: Tokenizer) -> None:
    """Also for bytes that are not UTF-8, as of most random tokens."""
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_half_a_character_is_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("👩‍👧")
    text = Detokenizer(tokenizer)
    pieces = [text.push(i) for i in ids]
    assert len(ids) > 3
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces


def test_an_output_truncated_within_a_character_ends_with_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("漢")
    assert len(ids) > 1
    assert streamed(tokenizer, ids[:-1]) == "\ufffd"


def test_the_tokenizers_properties(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.model_max_length == 8192


class Letters:
    """A tokenizer whose tokens are letters."""

    is_byte_level = True
    neutral_ids: Sequence[int] = ()

    def is_byte(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def letters(text: str, *stop: str) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(Letters(), stop)
    pieces = [detokenizer.push(ord(char)) for char in text]
    return [*pieces, detokenizer.flush()], detokenizer.stopped_by


def test_a_stop_string_ends_the_text_before_it() -> None:
    pieces, by = letters("hello STOP more", "STOP")
    assert "".join(pieces) == "hello "
    assert by == "STOP"


def test_only_the_beginning_of_a_stop_string_is_held_back() -> None:
    pieces, by = letters("abSTxST", "STOP")
    assert pieces == ["a", "b", "", "", "STx", "", "", "ST"]
    assert by is None


def test_a_beginning_within_a_failed_beginning_is_found() -> None:
    pieces, by = letters("xaab", "aab")
    assert ("".join(pieces), by) == ("x", "aab")
    pieces, by = letters("aaab!", "aab")
    assert ("".join(pieces), by) == ("a", "aab")


def test_of_several_stop_strings_the_first_one_found_is_used() -> None:
    pieces, by = letters("one two three", "three", "two")
    assert ("".join(pieces), by) == ("one ", "two")
    pieces, by = letters("xaby", "abyz", "b")
    assert ("".join(pieces), by) == ("xa", "b")


@given(text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_found_as_in_the_whole_text(text: str, stops: list[str]) -> None:
    pieces, by = letters(text, *stops)
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert ("".join(pieces), by) == (text, None)
        return
    seen = text[: min(ends)]  # the first complete stop string ends the output
    starts = {s: seen.find(s) for s in stops if s in seen}
    assert "".join(pieces) == seen[: min(starts.values())]
    assert by in starts


def test_an_error_names_a_missing_or_damaged_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_long_text_does_not_block_other_threads(tokenizer: Tokenizer) -> None:
    begun, done = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        tokenizer.encode(" " * 4_000_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    time.sleep(0.02)
    assert not done.is_set()
    thread.join()
