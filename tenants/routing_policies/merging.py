"""Comparison of two versions of a policy rule by rule, and the merge of two changes of one version. Does not import
Django.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any

import msgspec

from inference_worker.contract.texts import Text
from tenants.routing_policies import policy
from tenants.routing_policies.policy import Rule


class ChangedSide(StrEnum):
    """The side of a concurrent change that changed something."""

    LIVE = "live"
    EDITED = "edited"
    SAME = "same"  # both, in the same way
    BOTH = "both"  # differently


@dataclass(frozen=True)
class RulePair:
    """A rule in two versions, by index. None: that version does not have it."""

    old: int | None
    new: int | None


@dataclass(frozen=True)
class RuleTriple:
    """A rule in the base and in both changes of it, by index."""

    base: int | None
    live: int | None
    edited: int | None


def match_rules(old: Sequence[Rule], new: Sequence[Rule]) -> list[RulePair]:
    """Return the rules of the new version with those of the old one that they are, then the removed ones.

    Equal rules are the same rule, then rules of one name, then rules with the same conditions, then unnamed rules in
    their order.
    """
    found: dict[int, int] = {}
    identities: tuple[Callable[[Rule], Any], ...] = (
        lambda rule: rule,
        lambda rule: rule.name or None,
        lambda rule: rule.when if not rule.name else None,
        lambda rule: True if not rule.name else None,
    )
    for identity in identities:
        left = [index for index in range(len(old)) if index not in found.values()]
        for number, rule in enumerate(new):
            wanted = None if number in found else identity(rule)
            same = None if wanted is None else next((index for index in left if identity(old[index]) == wanted), None)
            if same is not None:
                found[number] = same
                left.remove(same)
    kept = [RulePair(found.get(number), number) for number in range(len(new))]
    return kept + [RulePair(index, None) for index in range(len(old)) if index not in found.values()]


def moved_rules(pairs: Iterable[RulePair]) -> set[int]:
    """Return the rules of the new version that have another place among the rules of both versions."""
    kept = [(pair.old, pair.new) for pair in pairs if pair.old is not None and pair.new is not None]
    blocks = SequenceMatcher(None, sorted(kept), kept, autojunk=False).get_matching_blocks()
    stable = {kept[block.b + offset] for block in blocks for offset in range(block.size)}
    return {new for old, new in kept if (old, new) not in stable}


def match_changes(base: Sequence[Rule], live: Sequence[Rule], edited: Sequence[Rule]) -> list[RuleTriple]:
    """Return each rule of three versions once: the edited ones, then the live ones, then removed ones."""
    in_live = {pair.old: pair.new for pair in match_rules(base, live) if pair.old is not None}
    in_edited = {pair.old: pair.new for pair in match_rules(base, edited) if pair.old is not None}
    added_live = [number for number in range(len(live)) if number not in in_live.values()]
    added_edited = [number for number in range(len(edited)) if number not in in_edited.values()]
    pairs = match_rules([live[number] for number in added_live], [edited[number] for number in added_edited])
    found = [RuleTriple(index, in_live[index], in_edited[index]) for index in range(len(base))]
    found += [
        RuleTriple(
            None,
            None if pair.old is None else added_live[pair.old],
            None if pair.new is None else added_edited[pair.new],
        )
        for pair in pairs
    ]
    last = len(edited) + len(live)
    return sorted(
        found,
        key=lambda triple: (
            triple.edited if triple.edited is not None else last,
            triple.live if triple.live is not None else last,
        ),
    )


def side_of(base: Any, live: Any, edited: Any) -> ChangedSide | None:
    """Return the side that changed a value; None: no side did."""
    if live == edited:
        return None if base == edited else ChangedSide.SAME
    if live == base:
        return ChangedSide.EDITED
    return ChangedSide.LIVE if edited == base else ChangedSide.BOTH


@dataclass(frozen=True)
class MergeChoices:
    """The sides that a user chose, LIVE or EDITED. What is not chosen has the change of the side that changed it.

    `rules` has the side of rules, by their index in `match_changes`, and `settings` that of all other settings.
    """

    rules: Mapping[int, ChangedSide] = field(default_factory=dict)
    settings: ChangedSide | None = None


def merge(
    base: Mapping[str, Any] | None,
    live: Mapping[str, Any],
    edited: Mapping[str, Any],
    choices: MergeChoices | None = None,
) -> dict[str, Any]:
    """Return the policy with the changes of both sides. What both changed differently is as in `edited`, unless chosen.

    Args:
        base: None if both sides added the policy.

    Raises:
        ValueError: one of them is not a valid policy, or no rule is left.
    """
    choices = choices or MergeChoices()
    before, other, own = ({} if body is None else _normalize(body) for body in (base, live, edited))
    rules = _merge_rules(
        () if base is None else policy.parse(before).rules,
        policy.parse(other).rules,
        policy.parse(own).rules,
        choices.rules,
    )
    if not rules:
        raise ValueError(Text("No rule is left. Choose at least one."))
    merged: dict[str, Any] = {"rules": _as_json(rules)}
    for name in dict.fromkeys([*own, *other]):
        if name == "rules":
            continue
        side = choices.settings or side_of(before.get(name), other.get(name), own.get(name))
        value = (other if side == ChangedSide.LIVE else own).get(name)
        if value is not None:
            merged[name] = value
    return merged


def _merge_rules(
    base: Sequence[Rule], live: Sequence[Rule], edited: Sequence[Rule], choices: Mapping[int, ChangedSide]
) -> list[Rule]:
    """Return the rules of both sides in the order of `edited`. New live rules follow the rule before them."""
    triples = match_changes(base, live, edited)
    chosen: dict[RuleTriple, Rule] = {}
    for index, triple in enumerate(triples):
        versions = _rules_at(triple, base, live, edited)
        rule = versions[1] if choices.get(index, side_of(*versions)) == ChangedSide.LIVE else versions[2]
        if rule is not None:
            chosen[triple] = rule
    merged = [triple for triple in triples if triple.edited is not None]
    for triple in sorted((t for t in triples if t.edited is None and t.live is not None), key=_live_index):
        before = [other for other in merged if other.live is not None and other.live < _live_index(triple)]
        place = merged.index(max(before, key=_live_index)) + 1 if before else 0
        merged.insert(place, triple)
    return [chosen[triple] for triple in merged if triple in chosen]


def _rules_at(
    triple: RuleTriple, base: Sequence[Rule], live: Sequence[Rule], edited: Sequence[Rule]
) -> tuple[Rule | None, Rule | None, Rule | None]:
    return (
        None if triple.base is None else base[triple.base],
        None if triple.live is None else live[triple.live],
        None if triple.edited is None else edited[triple.edited],
    )


def _live_index(triple: RuleTriple) -> int:
    return -1 if triple.live is None else triple.live


def _normalize(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without the short form and without defaults."""
    normal: dict[str, Any] = _as_json(policy.parse(body))
    return normal


def _as_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))
