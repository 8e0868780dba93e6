"""The sheet "What changes": the differences between versions of a policy in words, rule by rule."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import exact, signed_share
from frontend.core.page_context import PageContext
from frontend.tenant.routing import page
from frontend.tenant.routing.checking import CheckResult
from frontend.tenant.routing.page import RoutingPanel
from tenants.models import RoutingPolicy
from tenants.routing_policies import policy
from tenants.routing_policies.diffs import DiffLine, diff, pretty
from tenants.routing_policies.merging import (
    ChangedSide,
    MergeChoices,
    match_changes,
    match_rules,
    merge,
    moved_rules,
    side_of,
)
from tenants.routing_policies.policy import Policy

SIDES = {
    ChangedSide.LIVE: (_lazy("Changed in the live version"), "info"),
    ChangedSide.EDITED: (_lazy("Changed by you"), "good"),
    ChangedSide.SAME: (_lazy("Same change in both"), ""),
    ChangedSide.BOTH: (_lazy("Changed differently in both"), "bad"),
}
_NO_POLICY = RoutingPanel((), ())
_CHOICE = re.compile(r"choice-(\d{1,4})", re.ASCII)
_SETTINGS_CHOICE = "choice-settings"
_SIDE_OF_CHOICE = {"live": ChangedSide.LIVE, "edited": ChangedSide.EDITED}


@dataclass(frozen=True)
class PolicyChange:
    """A change of a rule, or of the other settings. `kind` is in words."""

    title: str
    kind: str
    color: str
    lines: tuple[DiffLine, ...]


@dataclass(frozen=True)
class ConcurrentChange:
    """A rule, or the other settings, in three versions: that before both changes, the live one, and that of the user.

    A version without the rule has no lines. `field` is the name of the user's choice; empty: both versions are equal.
    """

    field: str
    choice: str  # chosen at first: live, edited, or both, which merges the other settings one by one
    title: str
    kind: str
    color: str
    base: tuple[str, ...]
    live: tuple[str, ...]
    edited: tuple[str, ...]

    @property
    def choices(self) -> tuple[tuple[str, str], ...]:
        """The values of the choice with their labels."""
        own = (("live", _("Live version")), ("edited", _("Yours")))
        return (*own, ("both", _("Both"))) if self.choice == "both" else own


@dataclass(frozen=True)
class PolicyConflict:
    """A policy whose base version is not the live one any more. `is_comparable`: its rules can be chosen one by one.

    Otherwise, a release with other rules wrote one of the versions.
    """

    active: RoutingPolicy
    changes: tuple[ConcurrentChange, ...] = ()
    is_comparable: bool = False


def changes_in_words(ctx: PageContext, before: Mapping[str, Any] | None, after: Policy) -> list[PolicyChange]:
    """Return the changes since the body of the live version; None: there is none. Call inside `ctx.scope()`."""
    old = None if before is None else _parse(before)
    if before is not None and old is None:  # written by a release with other rules
        return []
    old_words = _NO_POLICY if old is None else page.in_words(ctx, old)
    new_words = page.in_words(ctx, after)
    pairs = match_rules(() if old is None else old.rules, after.rules)
    moved = moved_rules(pairs)
    found = []
    for pair in pairs:
        was = [] if pair.old is None else rule_lines(old_words.rules[pair.old])
        now = [] if pair.new is None else rule_lines(new_words.rules[pair.new])
        title = _title(new_words.rules[pair.new] if pair.new is not None else old_words.rules[pair.old or 0])
        if pair.old is None:
            found.append(PolicyChange(title, _("Added"), "good", _lines((), now)))
        elif pair.new is None:
            found.append(PolicyChange(title, _("Removed"), "bad", _lines(was, ())))
        elif old is not None and old.rules[pair.old] != after.rules[pair.new]:
            found.append(PolicyChange(title, _("Changed"), "info", _lines(was, now)))
        elif pair.new in moved:
            text = _("Rule %(old)s is now rule %(new)s.") % {"old": pair.old + 1, "new": pair.new + 1}
            found.append(PolicyChange(title, _("Moved"), "info", ((" ", text),)))
    was, now = [] if old is None else policy_lines(old_words), policy_lines(new_words)
    if was != now:
        found.append(PolicyChange(_("Other settings"), _("Changed") if old else _("Added"), "info", _lines(was, now)))
    return found


def headline(checked: CheckResult) -> str:
    """Return the number of recent requests that move, with the change of their cost; empty without requests."""
    trial = checked.trial
    if trial is None or not trial.requests:
        return ""
    counts = {"moved": exact(len(trial.moved)), "requests": exact(trial.requests)}
    if trial.priced and trial.cost_femto:
        change = signed_share(trial.new_cost_femto - trial.cost_femto, trial.cost_femto)
        return _("%(moved)s of %(requests)s recent requests move, cost %(change)s") % {**counts, "change": change}
    return _("%(moved)s of %(requests)s recent requests move") % counts


def conflict(
    ctx: PageContext, base_body: Mapping[str, Any] | None, active: RoutingPolicy, edited: Mapping[str, Any]
) -> PolicyConflict:
    """Return the difference of three versions. Without a base, each rule was added. Call inside `ctx.scope()`."""
    parsed = [_parse(body) for body in (base_body or edited, active.body, edited)]
    before, live, own = parsed
    if before is None or live is None or own is None:
        return PolicyConflict(active)
    words = [page.in_words(ctx, each) for each in (before, live, own)]
    if base_body is None:
        words[0] = _NO_POLICY
    found = []
    triples = match_changes(() if base_body is None else before.rules, live.rules, own.rules)
    for number, triple in enumerate(triples):
        rows = [
            None if index is None else panel.rules[index]
            for index, panel in zip((triple.base, triple.live, triple.edited), words, strict=True)
        ]
        lines = [() if row is None else tuple(rule_lines(row)) for row in rows]
        title = _title(next(row for row in reversed(rows) if row is not None))
        found.append(_concurrent(f"choice-{number}", title, lines))
    lines = [tuple(policy_lines(panel)) for panel in words]
    found.append(_concurrent(_SETTINGS_CHOICE, _("Other settings"), lines))
    return PolicyConflict(active, tuple(row for row in found if row is not None), is_comparable=True)


def merge_chosen(
    base_body: Mapping[str, Any] | None,
    active: RoutingPolicy,
    edited: Mapping[str, Any],
    posted: Mapping[str, str],
) -> str:
    """Return the text of the policy with the versions of rules that the user chose in the form of a conflict.

    Raises:
        ValueError: one of the versions is not valid, or no rule is left.
    """
    rules = {}
    for name, value in posted.items():
        found = _CHOICE.fullmatch(name)
        if found and value in _SIDE_OF_CHOICE:
            rules[int(found[1])] = _SIDE_OF_CHOICE[value]
    settings = _SIDE_OF_CHOICE.get(posted.get(_SETTINGS_CHOICE, ""))
    return pretty(merge(base_body, active.body, edited, MergeChoices(rules, settings)))


def rule_lines(rule: Mapping[str, Any]) -> list[str]:
    """Return a rule of a `RoutingPanel` as lines."""
    if rule["conditions"]:
        first = _("When: %(conditions)s") % {"conditions": _(" and ").join(rule["conditions"])}
    else:
        first = _("Every request") if rule["number"] == 1 else _("Every other request")
    is_shared = len(rule["drawn"]) > 1 and not rule["strategy"]
    targets = ", ".join(f"{target.model} {share}" if is_shared else target.model for target, share in rule["drawn"])
    strategy = f" ({rule['strategy']})" if rule["strategy"] else ""
    lines = [first, _("Send to%(strategy)s: %(targets)s") % {"strategy": strategy, "targets": targets}]
    if rule["standing_by"]:
        lines.append(_("Then: %(targets)s") % {"targets": ", ".join(rule["standing_by"])})
    if rule["escalation"]:
        lines.append(_("Next target if the answer %(escalation)s") % {"escalation": rule["escalation"]})
    return lines


def policy_lines(words: RoutingPanel) -> list[str]:
    """Return a policy without its rules as lines."""
    if words is _NO_POLICY:
        return []
    fallbacks = ", ".join(map(str, words.fallbacks))
    first = _("Falls back before the first token on: %(fallbacks)s") % {"fallbacks": fallbacks}
    return [first if fallbacks else _("No fallback"), *words.more]


def _concurrent(field: str, title: str, lines: Sequence[tuple[str, ...]]) -> ConcurrentChange | None:
    base, live, edited = lines
    side = side_of(base, live, edited)
    if side is None:
        return None
    kind, color = SIDES[side]
    choice = "live" if side == ChangedSide.LIVE else "edited"
    if side == ChangedSide.BOTH and field == _SETTINGS_CHOICE:
        choice = "both"
    field = "" if side == ChangedSide.SAME else field
    return ConcurrentChange(field, choice, title, str(kind), color, base, live, edited)


def _title(rule: Mapping[str, Any]) -> str:
    title = _("Rule %(number)s") % {"number": rule["number"]}
    return f"{title} · {rule['name']}" if rule["name"] else title


def _lines(old: Iterable[str], new: Iterable[str]) -> tuple[DiffLine, ...]:
    return tuple(diff("\n".join(old), "\n".join(new)))


def _parse(body: Mapping[str, Any]) -> Policy | None:
    try:
        return policy.parse(body)
    except ValueError:
        return None
