"""Patterns of answers: the same matches as Python's, in linear time."""

from __future__ import annotations

import random
import re

import pytest

from tenants.routing_policies.answer_pattern import AnswerPattern, PatternError

PATTERNS = (
    *("a*", "(a|b)*c", "a{2,4}", "a{0}b", "(?:ab?){2,}", "[^a-c]x?", r"\d+\.\d{2}", r"[\w-]+", "(a|)b+", "", "(a*)*b"),
    *("[]a]", "[a-]{3}", "a{3}", r"\S+ ?\D", "(yes|no)[.]?"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_pythons_expression_matches(pattern: str) -> None:
    draw = random.Random(pattern)
    compiled = AnswerPattern(pattern)
    for _ in range(300):
        text = "".join(draw.choice("abcx-].13 ") for _ in range(draw.randint(0, 6)))
        assert compiled.matches(text) == bool(re.fullmatch(pattern, text, re.DOTALL)), text


def test_anchors_have_no_effect() -> None:
    assert AnswerPattern("^ab$").matches("ab")
    assert AnswerPattern(r"a\$").matches("a$")


@pytest.mark.parametrize(
    "pattern",
    ["(", "a**", r"\1", "(?=a)", "[a", "a{9999}", "*", "a)", r"\p", "[z-a]", "((a{1000}){1000}){9}"],
)
def test_unsupported_patterns_are_rejected(pattern: str) -> None:
    with pytest.raises(PatternError):
        AnswerPattern(pattern)


def test_the_work_of_a_match_is_bounded() -> None:
    assert AnswerPattern("(a*)*b").matches("a" * 100_000) is False
    distinct = "".join(chr(0x4E00 + number) for number in range(20_000))
    assert AnswerPattern("(.*.*){20}y").matches(distinct) is None  # it would visit too many states
