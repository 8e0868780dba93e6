r"""Regular expressions of JSON schemas that the grammar library enforces as ECMAScript means them.

They have characters, `.`, classes, groups, `|`, quantifiers, and `^` and `$` at the ends of the text. Look-around,
references, word boundaries and escapes such as `\Z`, which other languages have, are not supported.
"""

from __future__ import annotations

import re
from itertools import combinations

MAX_PATTERN_CHARACTERS = 8192
MAX_GROUPS = 64  # nested groups
_CATEGORY = (
    r"\{(?:L[ulmto]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cfo]?|Letter|Alphabetic"
    r"|Script=(?:Arabic|Cyrillic|Devanagari|Greek|Han|Hangul|Hebrew|Hiragana|Katakana|Latin|Thai))\}"
)
_ESCAPE = r"\\(?:[dDwWsSnrtfv]|[ -/:-@\[-`{-~]|x[0-9A-Fa-f]{2}|u(?![Dd][89A-Fa-f])[0-9A-Fa-f]{4}|[pP]" + _CATEGORY + ")"
_ATOM = re.compile(
    rf"""
    (?P<open>\((?:\?:|\?P?<[A-Za-z_][A-Za-z0-9_]*>)?(?![?*+]))
    | (?P<close>\))
    | (?P<either>\|)
    | (?P<item>
        {_ESCAPE}
        | \[(?:\^|(?!\^))(?:(?!&&|--|~~|\\[<>`])(?:{_ESCAPE}|[^\[\]\\]))+\]
        | [^\\\[\](){{}}*+?|^$]
        | \.
      )
    """,
    re.VERBOSE,
)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d{1,5})(?:(,)(\d{1,5})?)?\})\??(?![*+?{])")
_END = re.compile(r"\$\)*\Z")
_WORD_EDGES = ("\\<", "\\>")
_ESCAPED = re.compile(_ESCAPE)
_RANGE = re.compile(rf"({_ESCAPE}|[^\\])-({_ESCAPE}|[^\\\]])")
_PREFIX = re.compile(r"\^((?:[A-Za-z0-9_ :/@-]|\\[.\-_/$])+)")
_REPEATED = frozenset("*+?{|")


def is_supported_pattern(pattern: str) -> bool:
    """Return whether the grammar library enforces a regular expression."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        return False
    at, names, is_repeatable = 0, set[str](), False
    is_first = True  # only the begins of groups and alternatives precede
    groups: list[bool] = []  # for each open group: nothing precedes it
    while at < len(pattern):
        if is_repeatable and (match := _QUANTIFIER.match(pattern, at)) is not None:
            low, _, high = match.groups()
            if low is not None and high is not None and int(low) > int(high):
                return False
            at, is_repeatable = match.end(), False
            continue
        if pattern[at] == "^" and is_first:
            at, is_first = at + 1, False
            continue
        if pattern[at] == "$" and (_END.match(pattern, at) or (not groups and pattern[at + 1] == "|")):
            at, is_repeatable = at + 1, False
            continue
        if (match := _ATOM.match(pattern, at)) is None:
            return False
        text, kind = match.group(), match.lastgroup
        if text in _WORD_EDGES or (text.startswith("[") and not _has_ordered_ranges(text)):
            return False
        if kind == "open":
            groups.append(is_first)
            name = text.rpartition("<")[2] if "<" in text else ""
            if len(groups) > MAX_GROUPS or (name and name in names):
                return False
            names.add(name)
        elif kind == "either":
            is_first = groups[-1] if groups else True
        elif kind == "close" and not groups:
            return False
        else:
            is_first = False
            if kind == "close":
                groups.pop()
        at, is_repeatable = match.end(), kind in ("item", "close")
    return not groups


def are_disjoint_names(patterns: list[str]) -> bool:
    """Return whether each pattern is supported and no name matches two of them; False if that is not obvious."""
    if not all(map(is_supported_pattern, patterns)):
        return False
    if len(patterns) == 1:
        return True
    prefixes = [_prefix(pattern) for pattern in patterns]
    return len(patterns) <= 64 and all(
        first and second and not first.startswith(second) and not second.startswith(first)
        for first, second in combinations(prefixes, 2)
    )


def _prefix(pattern: str) -> str:
    """Return characters with which every match begins; empty if there are none."""
    match = _PREFIX.match(pattern)
    if match is None or "|" in pattern:
        return ""
    text = match.group(1)
    if pattern[match.end() : match.end() + 1] in _REPEATED:  # the last character may be absent
        text = text[:-2] if text[-2:-1] == "\\" else text[:-1]
    return text.replace("\\", "")


def _has_ordered_ranges(text: str) -> bool:
    """Return whether the ranges of a class are between single characters, in order."""
    at, end = (2 if text.startswith("[^") else 1), len(text) - 1
    while at < end:
        if (match := _RANGE.match(text, at, end)) is None:
            escape = _ESCAPED.match(text, at, end)
            at = at + 1 if escape is None else escape.end()
            continue
        low, high = map(_character, match.groups())
        if low is None or high is None or low > high:
            return False
        at = match.end()
    return True


def _character(text: str) -> str | None:
    r"""Return the character of an atom of a class; None for a set such as `\d`."""
    if not text.startswith("\\"):
        return text
    if text[1] in "dDwWsSpP":
        return None
    if text[1] in "xu":
        return chr(int(text[2:], 16))
    return {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}.get(text[1], text[1])
