"""Inputs of encoders: they are truncated as the library tokenizers truncates them for sentence-transformers."""

from __future__ import annotations

import string
from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from inference_worker.checkpoints.input_encoder import InputEncoder, InputLimit, InputTooLong, share_room
from inference_worker.checkpoints.tokenizer import Tokenizer
from tests.support.engine.tiny_models import make_tokenizer

TEXTS = st.text(string.ascii_lowercase + " .", max_size=40)


def make_core(name: str) -> tokenizers.Tokenizer:
    """Return a tokenizer with the special tokens of a family."""
    core = make_tokenizer()
    cls, sep = (("[CLS]", core.token_to_id("[CLS]")), ("[SEP]", core.token_to_id("[SEP]")))
    if name == "roberta":
        core.post_processor = processors.RobertaProcessing(sep, cls)
    elif name == "ends":  # a decoder that embeds
        core = tokenizers.Tokenizer(models.BPE({letter: n for n, letter in enumerate(byte_alphabet())}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(["<|end|>"])
        end = ("<|end|>", core.token_to_id("<|end|>"))
        core.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="$A <|end|>", pair="$A <|end|> $B <|end|>", special_tokens=[end]),
            ]
        )
    elif name == "none":
        core.post_processor = None
    return core


def byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


CORES = {name: make_core(name) for name in ("bert", "roberta", "ends", "none")}


@cache
def truncating(name: str, limit: InputLimit) -> tokenizers.Tokenizer:
    """Return the library's own tokenizer with truncation."""
    library = tokenizers.Tokenizer.from_str(CORES[name].to_str())
    library.enable_truncation(limit.max_tokens, strategy="longest_first", direction=limit.direction)
    return library


@pytest.mark.parametrize("name", CORES)
@given(text=TEXTS, max_tokens=st.integers(3, 30), keeps_end=st.booleans())
def test_a_text_is_truncated_as_by_the_library(name: str, text: str, max_tokens: int, keeps_end: bool) -> None:
    core, limit = CORES[name], InputLimit(max_tokens, keeps_end)
    encoded, whole = InputEncoder(core).encode_text(text, limit), core.encode(text).ids
    assert encoded.ids == truncating(name, limit).encode(text).ids
    assert encoded.is_truncated == (len(whole) > max_tokens)
    assert InputEncoder(core).truncate_ids(whole, limit)[:2] == encoded[:2]


@pytest.mark.parametrize("name", CORES)
@given(first=TEXTS, second=TEXTS, max_tokens=st.integers(5, 60), keeps_end=st.booleans())
def test_a_pair_is_truncated_as_by_the_library(
    name: str, first: str, second: str, max_tokens: int, keeps_end: bool
) -> None:
    core, limit = CORES[name], InputLimit(max_tokens, keeps_end)
    encoded, whole = InputEncoder(core).encode_pair(first, second, limit), core.encode(first, second)
    expected = truncating(name, limit).encode(first, second)
    assert encoded.ids == expected.ids
    assert encoded.is_truncated == (len(whole.ids) > max_tokens)
    if name != "none":  # without a template of pairs, the library gives types that no model has
        types = expected.type_ids
        assert encoded.second_start == (types.index(1) if 1 in types else len(types))


@given(first=st.integers(0, 50), second=st.integers(0, 50), room=st.integers(1, 60))
def test_two_texts_fill_their_room(first: int, second: int, room: int) -> None:
    shares = share_room(first, second, room)
    assert sum(shares) == min(room, first + second)
    assert shares[0] <= first
    assert shares[1] <= second


def test_a_limit_without_room_for_a_text_is_an_error() -> None:
    encoder = InputEncoder(CORES["bert"])
    assert len(encoder.encode_text("ab", InputLimit(3)).ids) == 3
    for encode in (
        lambda: encoder.encode_text("a", InputLimit(2)),
        lambda: encoder.truncate_ids([7] * 5, InputLimit(2)),
        lambda: encoder.encode_pair("a", "b", InputLimit(3)),
    ):
        with pytest.raises(InputTooLong):
            encode()


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}!"


TOKENIZER = Tokenizer(
    make_core("ends"), chat_template=TEMPLATE, special_tokens={}, eos_token_ids=(), model_max_length=1 << 20
)


@given(query=TEXTS, document=TEXTS, max_tokens=st.integers(20, 80), keeps_end=st.booleans())
def test_only_the_texts_of_a_rendered_pair_are_truncated(
    query: str, document: str, max_tokens: int, keeps_end: bool
) -> None:
    """Each character is a token, so the expected text is known."""
    encode, limit = TOKENIZER.encode_rendered_pair, InputLimit(max_tokens, keeps_end)
    form = "[query]{}[document]{}!"
    try:
        encoded = encode("", query, document, limit)
    except InputTooLong:
        assert max_tokens <= len(form) - 4
        return
    first, second = share_room(len(query), len(document), max_tokens - len(form) + 4)
    cut = query[:first], document[:second]
    if keeps_end:
        cut = query[len(query) - first :], document[len(document) - second :]
    assert TOKENIZER.decode(encoded.ids) == form.format(*cut)
    assert encoded.is_truncated == (len(query) + len(document) > first + second)


def test_a_document_of_a_rendered_pair_has_a_limit_of_its_own() -> None:
    encode = TOKENIZER.encode_rendered_pair
    for limit, most, text, is_truncated in (
        (None, 2, "[query]ab[document]cd!", True),
        (InputLimit(100), 9, "[query]ab[document]cdef!", False),
        (InputLimit(22), 3, "[query]ab[document]cd!", True),
    ):
        encoded = encode("", "ab", "cdef", limit, most)
        assert (TOKENIZER.decode(encoded.ids), encoded.is_truncated) == (text, is_truncated)
