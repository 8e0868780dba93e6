"""Texts of tokens that depend on their neighbors: the first space, and tokens of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.checkpoints.detokenizer import Detokenizer
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.request import SamplingParams
from tests.support.engine.tiny_tokenizer import write_pieces, write_tokenizer

BOS, EOS, FIRST_BYTE, LETTERS = 1, 2, 3, range(259, 271)  # the letters are "▁", "a" to "h", "▁a", "▁b", "ab"


@pytest.fixture(scope="module", params=[True, False], ids=["as llama 2", "as gemma"])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("pieces")
    write_pieces(directory, adds_prefix=request.param)
    return Tokenizer.from_dir(directory)


def streamed(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    text = tokenizer.detokenizer(SamplingParams(), continues=tokenizer.is_continued(prompt))
    return "".join([text.push(token) for token in ids]) + text.flush()


def test_tokens_that_depend_on_their_neighbors_are_streamed_correctly(pieces: Tokenizer) -> None:
    assert not pieces.is_byte_level
    for text in ["abc", " ab cd", "a 漢字 b", "👩‍👧 ab", "ab  b   a", "👍👍🏽", ""]:
        ids = pieces.encode(text)
        assert pieces.decode(ids) == text
        assert streamed(pieces, ids) == pieces.decode(ids)
    cut = pieces.encode("a 漢")[:-1]
    assert streamed(pieces, cut) == pieces.decode(cut)


_texts = st.text(" abcdefghé漢👍\n", max_size=12)


@given(_texts, st.text("abcdefghé漢👍", min_size=1, max_size=4), st.lists(st.sampled_from(LETTERS), max_size=6), _texts)
def test_a_prompt_and_its_completion_are_the_decoded_whole(
    pieces: Tokenizer, before: str, end: str, ids: list[int], after: str
) -> None:
    prompt = pieces.encode(before + end)
    output = [*ids, *pieces.encode(after, add_special_tokens=False)]
    assert pieces.decode(prompt) + streamed(pieces, output, prompt) == pieces.decode(prompt + output)


def test_the_first_space(pieces: Tokenizer) -> None:
    space_a = pieces.encode("b a")[-1]
    begins_text = pieces.decode([space_a])
    assert begins_text == ("a" if pieces.encode("a")[1:] == [space_a] else " a")
    assert streamed(pieces, [space_a, space_a], pieces.encode("b")) == " a a"
    for prompt in ([], [BOS], [*pieces.encode("b"), EOS]):  # the output begins a text
        assert streamed(pieces, [space_a, space_a], prompt) == begins_text + " a"
        assert streamed(pieces, [BOS, space_a], prompt) == begins_text
    assert pieces.spell(space_a) == b" a"
    assert pieces.spell(space_a, begins_text=True) == begins_text.encode()


def test_a_special_token_does_not_change_the_text_after_it(pieces: Tokenizer) -> None:
    b, space_a = pieces.encode("b a")[-2:]
    for ids in ([b, EOS, space_a], [b, *[EOS] * 20, space_a, EOS], [EOS, space_a, EOS, space_a]):
        assert streamed(pieces, ids) == pieces.decode(ids)
        assert streamed(pieces, ids).endswith(" a") or ids[0] == EOS


def test_tokens_of_bytes(pieces: Tokenizer) -> None:
    for byte in range(256):
        assert pieces.spell(FIRST_BYTE + byte) == bytes([byte])
        assert pieces.spell(FIRST_BYTE + byte, begins_text=True) == bytes([byte])
        assert pieces.is_byte(FIRST_BYTE + byte)
    assert [pieces.spell(token) for token in (0, BOS, EOS)] == [b"<unk>", b"<s>", b"</s>"]
    assert not any(pieces.is_byte(token) for token in (0, BOS, *LETTERS))
    ids = pieces.encode("a漢👍 b", add_special_tokens=False)
    assert b"".join(map(pieces.spell, ids)).decode().removeprefix(" ") == "a漢👍 b"


def test_a_byte_without_a_character_does_not_change_the_text_before_it(pieces: Tokenizer) -> None:
    ids = pieces.encode("a漢", add_special_tokens=False)
    assert streamed(pieces, [*ids, FIRST_BYTE + 0xFF]) == "a漢\ufffd"
    assert streamed(pieces, [*ids, *ids[-3:-1]]) == "a漢\ufffd\ufffd"
    assert streamed(pieces, [*ids, FIRST_BYTE + 0xFF, *pieces.encode(" b", add_special_tokens=False)[-1:]]).startswith(
        "a漢\ufffd"
    )


def test_a_tokenizer_of_bytes_has_no_first_space(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, [])
    tokenizer = Tokenizer.from_dir(tmp_path)
    space, a = tokenizer.encode(" a")
    for continues in (True, False):
        text = Detokenizer(tokenizer, continues=continues)
        assert text.push(space) + text.push(a) == " a"
    assert tokenizer.spell(space) == tokenizer.spell(space, begins_text=True) == b" "
