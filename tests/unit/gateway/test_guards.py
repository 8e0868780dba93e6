"""The guards of semantic hits: differences that change the answer to a similar question."""

from __future__ import annotations

import time

import pytest

from millrace.gateway.answer_cache.guards import GUARDS, MAX_GUARDED_CHARACTERS, TOO_LONG, differences

DIFFERENT = {
    "numbers": [
        ("I want 5 apples", "I want 6 apples"),
        ("What is 2.5 + 1?", "What is 25 + 1?"),
        ("List three rivers", "List four rivers"),
        ("Write version 1.10", "Write version 1.1.0"),
    ],
    "units": [
        ("How far is 5 km?", "How far is 5 miles?"),
        ("Send €20", "Send $20"),
        ("Is 30°C warm?", "Is 30°F warm?"),
    ],
    "dates": [
        ("Are you open on Monday?", "Are you open on Tuesday?"),
        ("Show sales of last week", "Show sales of next week"),
        ("Revenue on 2024-01-05", "Revenue on 2024-01-06"),
        ("What happened in May?", "What happened?"),
    ],
    "negation": [
        ("Is aspirin safe?", "Is aspirin not safe?"),
        ("Why can I pay?", "Why can't I pay?"),
        ("A recipe with nuts", "A recipe without nuts"),
    ],
    "names": [
        ("Who is Paul Graham?", "Who is Ada Lovelace?"),
        ("Fly to Paris", "Fly to Rome"),
        ("What is NATO?", "What is OPEC?"),
    ],
    "code": [
        ("What does `os.path` do?", "What does `sys.path` do?"),
        ("Explain read_text", "Explain read_bytes"),
        ("Open /etc/hosts", "Open /etc/passwd"),
    ],
    "language": [
        ("Was ist das für ein Haus und wie ist es?", "What is this house and how is it built?"),
        ("Привет, как дела?", "Hello, how are you?"),
    ],
}
SAME = [
    ("How do I reset my password?", "What do I do to reset my password?"),
    ("Order two pizzas", "Order 2 pizzas"),
    ("How much is 1,000 USD?", "how much is $1000"),
    ("Is a visa card accepted?", "Do you accept Visa cards?"),
    ("I didn't get my card", "My card has not arrived"),
    ("It costs 2.50", "It costs 2.5"),
    ("May I ask a question?", "Can I ask a question?"),
]


@pytest.mark.parametrize(("guard", "pair"), [(name, pair) for name, pairs in DIFFERENT.items() for pair in pairs])
def test_guard_finds_the_difference_in_both_directions(guard: str, pair: tuple[str, str]) -> None:
    first, second = pair
    assert guard in differences(first, second)
    assert guard in differences(second, first)
    assert differences(first, first) == []


def test_every_guard_has_examples() -> None:
    assert DIFFERENT.keys() == GUARDS.keys()


@pytest.mark.parametrize("pair", SAME)
def test_no_guard_finds_a_difference_between_paraphrases(pair: tuple[str, str]) -> None:
    assert differences(*pair) == []


def test_long_questions_are_different() -> None:
    text = "a" * (MAX_GUARDED_CHARACTERS + 1)
    assert differences(text, text) == [TOO_LONG]


@pytest.mark.parametrize("part", ["1,", "a.", "`", "A ", "/", "-a", "1-", "@a.", "a_", "''", "May ", "\x00", "..", "9"])
@pytest.mark.usefixtures("frozen_heap")
def test_guards_are_fast_on_adversarial_texts(part: str) -> None:
    text = (part * MAX_GUARDED_CHARACTERS)[:MAX_GUARDED_CHARACTERS]
    began = time.process_time()
    differences(text, text[:-1] + "x")
    assert time.process_time() - began < 0.5
