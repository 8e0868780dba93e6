"""The characters that the fonts of invoices can show.

The fonts are Libertinus Serif, which is part of the typesetter, and the Noto fonts of two packages. Only the files of
Noto can be read, and they have nearly every character of Libertinus Serif. A text is printed as far as Noto has it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from unicodedata import category, normalize

from wcwidth import iter_graphemes

REPLACEMENT = "?"
MAX_CLUSTER = 32  # code points; the longest emoji and syllables have about a dozen
_PACKAGES = ("manimgx_fonts", "noto_cjk_sans_jp_regular")
_SUFFIXES = (".ttf", ".otf")
# Controls of direction. Without its end, one would reorder the texts beside it.
_DIRECTIONS = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)])
# Joiners, marks of direction and variation selectors. No font needs a glyph for them.
_INVISIBLE = "".join(map(chr, [0x061C, *range(0x200C, 0x2010), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]))
_NEEDS_NO_GLYPH = frozenset(map(ord, _INVISIBLE))


def printable(text: str) -> str:
    """Return the text with one question mark for each grapheme cluster that no single font can show completely."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_printable_cluster(cluster) for cluster in iter_graphemes(text.translate(_DIRECTIONS)))


@cache
def font_directories() -> tuple[Path, ...]:
    """Return the directories of the font packages."""
    return tuple(Path(path) for name in _PACKAGES for path in import_module(name).__path__)


@lru_cache(4096)
def _printable_cluster(cluster: str) -> str:
    if cluster.splitlines() == [""]:
        return "\n"
    if _is_whole(cluster):
        for form in (cluster, normalize("NFC", cluster), normalize("NFD", cluster)):
            if _has_font(set(map(ord, form)) - _NEEDS_NO_GLYPH):
                return form
    return " " if cluster.isspace() else REPLACEMENT


def _is_whole(cluster: str) -> bool:
    """Return whether a cluster is neither a control, nor marks without a base, nor excessively long."""
    visible = cluster.lstrip(_INVISIBLE)
    is_mark = next(iter_graphemes(f"a{visible}")) != "a"
    return len(cluster) <= MAX_CLUSTER and not is_mark and category(cluster[0]) != "Cc"


def _has_font(characters: Iterable[int]) -> bool:
    """Return whether one font has all of the characters. A font is read when no earlier one has them."""
    return any(_characters(path).issuperset(characters) for path in _font_files())


@cache
def _font_files() -> tuple[Path, ...]:
    """Return the files of the fonts, the smallest first."""
    files = (path for directory in font_directories() for path in directory.iterdir() if path.suffix in _SUFFIXES)
    return tuple(sorted(files, key=lambda path: (path.stat().st_size, path.name)))


@cache
def _characters(path: Path) -> frozenset[int]:
    """Return the characters of a font's `cmap` table, which has subtables of format 12 or 4 for Unicode.

    Raises:
        ValueError: it has no such subtable.
    """
    data = path.read_bytes()
    tables = (struct.unpack_from(">4s4xI", data, 12 + 16 * number) for number in range(_short(data, 4)))
    cmap = dict(tables)[b"cmap"]
    subtables = (cmap + _long(data, cmap + 8 + 8 * number) for number in range(_short(data, cmap + 2)))
    by_format = {_short(data, start): start for start in subtables}
    if 12 in by_format:
        return frozenset(_of_format_12(data, by_format[12]))
    if 4 in by_format:
        return frozenset(_of_format_4(data, by_format[4]))
    raise ValueError(f"{path.name}: no character map of format 12 or 4")


def _of_format_12(data: bytes, start: int) -> Iterable[int]:
    groups = struct.iter_unpack(">III", data[start + 16 : start + 16 + 12 * _long(data, start + 12)])
    return (code for first, last, _ in groups for code in range(first, last + 1))


def _of_format_4(data: bytes, start: int) -> Iterable[int]:
    """Yield the characters of the segments. Those with offsets may lead to the glyph 0, which is none."""
    size = _short(data, start + 6)  # bytes of each of four arrays: last, first, delta and offset
    for at in range(start + 14, start + 14 + size, 2):
        last, first, delta, offset = (_short(data, at + place) for place in (0, size + 2, 2 * size + 2, 3 * size + 2))
        for code in range(first, min(last, 0xFFFE) + 1):
            glyph = _short(data, at + 3 * size + 2 + offset + 2 * (code - first)) if offset else code
            if glyph and (glyph + delta) & 0xFFFF:
                yield code


def _short(data: bytes, start: int) -> int:
    return int.from_bytes(data[start : start + 2], "big")


def _long(data: bytes, start: int) -> int:
    return int.from_bytes(data[start : start + 4], "big")
