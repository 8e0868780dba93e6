"""The contents of a SentencePiece model file, a protobuf message, which is read without the library.

The file is not trusted: every length is checked. Fields that are not needed are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

MAX_PIECES = 1 << 20
MAX_PIECE_BYTES = 1 << 10
UNIGRAM, BPE = 1, 2  # model types
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


class PieceType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class VocabularyEntry:
    """An entry of the vocabulary. Its id is its position."""

    text: str
    score: float
    type: PieceType


@dataclass(slots=True)
class SentencePieceFile:
    """A model with its normalization."""

    pieces: list[VocabularyEntry] = field(default_factory=list)
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    whitespace_is_suffix: bool = False
    charsmap: bytes = b""  # compiled normalization rules; empty: none
    adds_prefix: bool = True  # a space is added before the text
    removes_spaces: bool = True  # at both ends, and repeated ones
    escapes_spaces: bool = True  # a space is the character U+2581


def parse(data: bytes) -> SentencePieceFile:
    """Parse the content of a model file.

    Raises:
        ValueError: it is damaged, or not such a file.
    """
    found = SentencePieceFile()
    for number, value in _fields(data):
        if number == 1:
            if len(found.pieces) == MAX_PIECES:
                raise ValueError(f"it has more than {MAX_PIECES} pieces")
            found.pieces.append(_piece(_data(value)))
        elif number == 2:
            trainer = dict(_fields(_data(value)))
            found.model_type = _number(trainer.get(3, UNIGRAM))
            found.whitespace_is_suffix = bool(_number(trainer.get(24, 0)))
            found.byte_fallback = bool(_number(trainer.get(35, 0)))
        elif number == 3:
            normalizer = dict(_fields(_data(value)))
            found.charsmap = _data(normalizer.get(2, b""))
            found.adds_prefix = bool(_number(normalizer.get(3, 1)))
            found.removes_spaces = bool(_number(normalizer.get(4, 1)))
            found.escapes_spaces = bool(_number(normalizer.get(5, 1)))
    if not found.pieces:
        raise ValueError("it has no pieces")
    return found


def _piece(data: bytes) -> VocabularyEntry:
    fields = dict(_fields(data))
    text = _data(fields.get(1, b""))
    if not 0 < len(text) <= MAX_PIECE_BYTES:
        raise ValueError(f"a piece has {len(text)} bytes")
    score = _data(fields.get(2, bytes(4)))
    if len(score) != 4:
        raise ValueError("a score is not a 32-bit number")
    return VocabularyEntry(text.decode(), struct.unpack("<f", score)[0], PieceType(_number(fields.get(3, 1))))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message. Numbers of fixed size are yielded as bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire_type == _BYTES:
            size, place = _varint(data, place)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError(f"it has a field of the unknown wire type {wire_type}")
        if size > len(data) - place:
            raise ValueError("it is truncated")
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the number at `place` and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place == len(data):
            raise ValueError("it is truncated")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("a number is too long")


def _data(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field is a number instead of bytes")
    return value


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has bytes instead of a number")
    return value
