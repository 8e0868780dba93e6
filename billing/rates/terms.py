"""Price terms of a tenant: tiers by the month's tokens, discounts and a minimum. Does not import Django.

Usage is charged at the prices pinned at its admission. Terms change the sum of a month's usage on its invoice: first
the tiers of each model and component, then discounts, then the minimum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from billing.currencies.amounts import MAX_NANO_PER_MILLION, PPM, femto_a_cent, half_up
from billing.rates.pricing import Component, Tier
from inference_worker.contract.texts import Text

MAX_TIERS = 100
MAX_MONTHLY_TOKENS = 10**15

UsageKey = tuple[str, str, str]  # model, service tier, component


class TermType(StrEnum):
    """How a price term changes the sum of a month's usage."""

    GRADUATED = "graduated"  # each token has the price of the tier that it is in
    VOLUME = "volume"  # all tokens have the price of the tier that the month's tokens reach
    DISCOUNT = "discount"
    MINIMUM = "minimum"


class VolumeTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The price of a month's tokens from a number on, up to the next tier. A price of 0 includes them."""

    from_tokens: int
    nano_per_million: int


class TermRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A price term. `ppm` and `cents` are those of a discount and of a minimum."""

    term_type: TermType
    model: str = ""  # model of a discount; empty: all models
    tier: Tier = Tier.STANDARD
    component: Component | None = None
    tiers: tuple[VolumeTier, ...] = ()
    ppm: int = 0
    cents: int = 0


class MonthlyUsage(NamedTuple):
    """The tokens of a model, tier and component in a month, and their cost at pinned prices."""

    tokens: int
    femto: int


def check_term(rule: TermRule) -> None:
    """Check a price term.

    Raises: ValueError with the field and the reason if it is invalid.
    """
    is_tiered = rule.term_type in (TermType.GRADUATED, TermType.VOLUME)
    if is_tiered != bool(rule.tiers):
        raise ValueError(Text("tiers: required for graduated and volume prices, and only for them"))
    if is_tiered and (not rule.model or rule.component is None):
        raise ValueError(Text("model and component: required for graduated and volume prices"))
    if is_tiered:
        _check_tiers(rule.tiers)
    if (rule.term_type == TermType.DISCOUNT) != (rule.ppm != 0) or not 0 <= rule.ppm <= PPM:
        raise ValueError(Text("ppm: a discount requires 1 to %(most)s", most=PPM))
    if (rule.term_type == TermType.MINIMUM) != (rule.cents != 0) or rule.cents < 0:
        raise ValueError(Text("cents: a minimum requires an amount greater than zero"))
    if rule.term_type == TermType.MINIMUM and rule.model:
        raise ValueError(Text("model: a minimum applies to all models"))


def _check_tiers(tiers: Sequence[VolumeTier]) -> None:
    starts = [tier.from_tokens for tier in tiers]
    if starts != sorted(set(starts)) or starts[0] != 0 or len(tiers) > MAX_TIERS or starts[-1] > MAX_MONTHLY_TOKENS:
        raise ValueError(
            Text(
                "tiers: start the first of up to %(max_tiers)s tiers at 0 tokens and each other one later",
                max_tiers=MAX_TIERS,
            )
        )
    if any(not 0 <= tier.nano_per_million <= MAX_NANO_PER_MILLION for tier in tiers):
        raise ValueError(Text("tiers: a price is out of range"))


def tiered_cost(rule: TermRule, tokens: int) -> int:
    """Return the cost of a month's tokens by the tiers of a term, in femto-USD."""
    if rule.term_type == TermType.VOLUME:
        reached = [tier for tier in rule.tiers if tier.from_tokens <= max(tokens - 1, 0)]
        return tokens * reached[-1].nano_per_million
    ends = [tier.from_tokens for tier in rule.tiers[1:]]
    cost = 0
    for tier, end in zip(rule.tiers, [*ends, None], strict=True):
        upper = tokens if end is None else min(tokens, end)
        cost += max(0, upper - tier.from_tokens) * tier.nano_per_million
    return cost


def changes(
    rules: Sequence[TermRule], usage: Mapping[UsageKey, MonthlyUsage], currency: str, metered: int = 0
) -> list[int]:
    """Return what each term adds to the cost of a month's usage in a currency, in femto-units and the order of `rules`.

    A discount is rounded half up to a femto-unit.

    Args:
        metered: the cost of metered usage, which minimums cover and other terms do not change.
    """
    costs = {key: item.femto for key, item in usage.items()}
    added = [0] * len(rules)
    order = (TermType.GRADUATED, TermType.VOLUME, TermType.DISCOUNT, TermType.MINIMUM)
    for place, rule in sorted(enumerate(rules), key=lambda item: (order.index(item[1].term_type), item[0])):
        if rule.tiers:
            key = rule.model, str(rule.tier), str(rule.component)
            if key in usage:
                cost = tiered_cost(rule, max(0, usage[key].tokens))
                added[place], costs[key] = cost - costs[key], cost
        elif rule.term_type == TermType.DISCOUNT:
            of_model = [key for key in costs if rule.model in ("", key[0])]
            for key in of_model:
                part = half_up(costs[key] * rule.ppm, PPM)
                added[place] -= part
                costs[key] -= part
        else:
            covered = sum(costs.values()) + metered + added_by_minimums(rules, added)
            added[place] = max(0, rule.cents * femto_a_cent(currency) - covered)
    return added


def added_by_minimums(rules: Sequence[TermRule], added: Sequence[int]) -> int:
    """Return what minimums added so far: of several ones, the highest applies."""
    return sum(amount for rule, amount in zip(rules, added, strict=True) if rule.term_type == TermType.MINIMUM)
