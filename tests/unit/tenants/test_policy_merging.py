"""The comparison of policies rule by rule, and the merge of concurrent changes."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest

from tenants.routing_policies.merging import (
    ChangedSide,
    MergeChoices,
    RulePair,
    match_changes,
    match_rules,
    merge,
    moved_rules,
    side_of,
)
from tenants.routing_policies.policy import Rule, parse


def named(name: str, model: str = "a", **fields: Any) -> dict[str, Any]:
    return {"name": name, "when": {"task": [f"task {name}"]}, "targets": [{"model": model}], **fields}


LAST = {"targets": [{"model": "a"}]}


def body(*rules: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"rules": list(rules), **fields}


def rules(*given: dict[str, Any]) -> tuple[Rule, ...]:
    return parse(body(*given)).rules


def pairs(old: tuple[Rule, ...], new: tuple[Rule, ...]) -> list[tuple[int | None, int | None]]:
    return [(pair.old, pair.new) for pair in match_rules(old, new)]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([named("x"), LAST], [named("x"), LAST], [(0, 0), (1, 1)]),
        ([named("x"), named("y")], [named("y"), named("x")], [(1, 0), (0, 1)]),
        ([named("x"), LAST], [named("x", "b"), LAST], [(0, 0), (1, 1)]),
        ([named("x"), LAST], [named("z"), named("x"), LAST], [(None, 0), (0, 1), (1, 2)]),
        ([named("x"), named("y"), LAST], [named("y"), LAST], [(1, 0), (2, 1), (0, None)]),
        ([LAST], [{"targets": [{"model": "b"}]}], [(0, 0)]),
        ([named(""), LAST], [named("", "b"), LAST], [(0, 0), (1, 1)]),
        ([named("x")], [named("y")], [(None, 0), (0, None)]),
        ([], [LAST], [(None, 0)]),
    ],
)
def test_rules_of_two_versions_are_matched(old, new, expected):
    before = rules(*old) if old else ()
    assert pairs(before, rules(*new)) == expected
    assert match_rules(before, before) == [RulePair(index, index) for index in range(len(before))]


@pytest.mark.parametrize(
    ("order", "moved"), [("abcd", ""), ("bacd", "b"), ("bcda", "a"), ("dabc", "d"), ("xabcd", ""), ("acd", "")]
)
def test_only_rules_that_changed_their_place_are_moved(order, moved):
    old, new = (rules(*map(named, names)) for names in ("abcd", order))
    assert "".join(order[index] for index in sorted(moved_rules(match_rules(old, new)))) == moved


@pytest.mark.parametrize(
    ("values", "side"),
    [
        ((1, 1, 1), None),
        ((1, 2, 1), ChangedSide.LIVE),
        ((1, 1, 2), ChangedSide.EDITED),
        ((1, 2, 2), ChangedSide.SAME),
        ((1, 2, 3), ChangedSide.BOTH),
        ((None, None, 1), ChangedSide.EDITED),
    ],
)
def test_the_side_that_changed_a_value(values, side):
    assert side_of(*values) == side


def test_each_rule_of_three_versions_is_listed_once():
    found = match_changes(
        rules(named("x"), named("gone"), LAST),
        rules(named("x", "b"), named("theirs"), LAST),
        rules(named("mine"), named("x"), LAST),
    )
    assert [(triple.base, triple.live, triple.edited) for triple in found] == [
        (None, None, 0),
        (0, 0, 1),
        (2, 2, 2),
        (None, 1, None),
        (1, None, None),
    ]


def test_changes_of_both_sides_are_merged():
    base = body(named("x"), named("y"), named("z"), LAST, fallback_on=["error"], semantic_cache=True)
    theirs = body(named("x", "b"), named("new"), named("y"), LAST, fallback_on=["overload"], first_token_ms=None)
    mine = body(named("x"), named("z"), named("y", "c"), LAST, fallback_on=["error"], context_overflow="drop_middle")
    del theirs["first_token_ms"]
    merged = merge(base, {**theirs, "semantic_cache": True}, mine)
    assert merged == {
        "rules": [named("x", "b"), named("new"), named("y", "c"), LAST],
        "fallback_on": ["overload"],
        "context_overflow": "drop_middle",
    }
    parse(merged)


def test_what_both_changed_differently_stays_as_mine():
    base, theirs, mine = body(named("x"), LAST), body(named("x", "b"), LAST), body(named("x", "c"), LAST)
    assert merge(base, theirs, mine) == mine
    assert merge(base, mine, mine) == mine
    assert merge(base, theirs, base) == theirs


def test_chosen_sides_are_merged():
    base = body(named("x"), named("y"), LAST, fallback_on=["error"])
    theirs = body(named("x", "b"), named("new"), LAST, fallback_on=["overload"])
    mine = body(named("x", "c"), named("y", "c"), LAST, fallback_on=["error"], context_overflow="drop_middle")
    live, edited = ChangedSide.LIVE, ChangedSide.EDITED
    # match_changes: x, y, the last rule, and the new one.
    for choices, expected in (
        (MergeChoices(), [named("x", "c"), named("new"), named("y", "c"), LAST]),
        (MergeChoices({0: live}), [named("x", "b"), named("new"), named("y", "c"), LAST]),
        (MergeChoices({1: live}), [named("x", "c"), named("new"), LAST]),
        (MergeChoices({3: edited}), [named("x", "c"), named("y", "c"), LAST]),
    ):
        assert merge(base, theirs, mine, choices)["rules"] == expected, choices
    assert merge(base, theirs, mine)["fallback_on"] == ["overload"]
    assert merge(base, theirs, mine, MergeChoices(settings=edited)) == {**mine, "rules": ANY}
    assert merge(base, theirs, mine, MergeChoices(settings=live)) == {"rules": ANY, "fallback_on": ["overload"]}
    assert merge(None, body(LAST), body(named("x"), LAST)) == body(named("x"), LAST)


def test_at_least_one_rule_is_left():
    choices = MergeChoices({0: ChangedSide.LIVE, 1: ChangedSide.EDITED})
    with pytest.raises(ValueError, match="No rule is left"):
        merge(body(named("old")), body(named("theirs")), body(named("own")), choices)


def test_the_short_form_is_merged_as_rules():
    merged = merge({"models": ["a", "b"]}, {"models": ["a", "b"]}, {"models": ["a", "c"]})
    assert merged == body({"targets": [{"model": "a"}, {"model": "c", "weight": 0}]})


def test_an_invalid_policy_is_not_merged():
    with pytest.raises(ValueError, match="rules"):
        merge(body(LAST), {"rules": []}, body(LAST))
