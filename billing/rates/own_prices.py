"""The usage at list prices that an amount pays at a tenant's own prices. Does not import Django.

Budgets reserve and count usage at the prices pinned at its admission. Price terms change what a month of this usage
costs, so an amount at own prices is converted: the usage never costs more than the amount, whatever models it uses.

The amount is spent at the highest ratio of own to pinned prices that usage can reach. Tiers change this ratio, and a
volume tier with a higher price also charges the difference for all earlier tokens of the month. The distance to a tier
is the cost of the tokens before it at the lowest pinned price.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from billing.currencies.amounts import FEMTO_A_NANO, MAX_BALANCE, PPM
from billing.rates.terms import MonthlyUsage, TermRule, TermType, UsageKey

_MOST = MAX_BALANCE * FEMTO_A_NANO


class TermMonth(NamedTuple):
    """The price terms of a month whose usage may increase, and its usage so far."""

    rules: Sequence[TermRule]
    usage: Mapping[UsageKey, MonthlyUsage]


class PaidUsage(NamedTuple):
    """The usage at pinned prices that an amount pays, in femto-units."""

    femto: int
    is_exact: bool  # whether all usage has the same ratio. Otherwise usage at a lower ratio leaves a rest to compute


class _Step(NamedTuple):
    """A tier that usage may reach: the least usage before it, what it charges for earlier tokens, and its ratio."""

    femto: int
    jump: Fraction
    ratio: Fraction | None  # None: a price for tokens that are free at pinned prices


def compute_affordable(
    available: int, months: Sequence[TermMonth], models: Collection[str], prices: Mapping[UsageKey, int]
) -> PaidUsage:
    """Return the usage at pinned prices that an amount surely pays. A negative amount is returned as it is.

    Args:
        models: the models with prices among those that terms name, and "" for other models.
        prices: the lowest pinned price of what tiers apply to. Without a price, it cannot be used.
    """
    ratios = {_multiply_discounts(month.rules, model) for month in months for model in models or ("",)} or {Fraction(1)}
    steps = sorted((step for month in months for step in _steps(month, prices)), key=lambda step: step.femto)
    is_exact = not steps and len(ratios) == 1
    if available <= 0:
        return PaidUsage(available, is_exact)
    femto, cost, ratio = 0, Fraction(), max(ratios)
    for step in steps:
        reached = cost + ratio * (step.femto - femto)
        if reached > available:
            break
        femto, cost = step.femto, reached + step.jump
        if cost > available or step.ratio is None:
            return PaidUsage(min(femto, _MOST), is_exact)
        ratio = max(ratio, step.ratio)
    return PaidUsage(min(femto + int((available - cost) / ratio), _MOST) if ratio else _MOST, is_exact)


def _multiply_discounts(rules: Sequence[TermRule], model: str) -> Fraction:
    """Return the part of a price that discounts leave."""
    left = Fraction(1)
    for rule in rules:
        if rule.term_type == TermType.DISCOUNT and rule.model in ("", model):
            left *= Fraction(PPM - rule.ppm, PPM)
    return left


def _steps(month: TermMonth, prices: Mapping[UsageKey, int]) -> Iterator[_Step]:
    """Yield the current tier and the later ones of everything that has tiers."""
    tiered: dict[UsageKey, TermRule] = {}
    for term_type in (TermType.GRADUATED, TermType.VOLUME):  # of several terms, the last one applies
        for rule in month.rules:
            if rule.term_type == term_type:
                tiered[rule.model, str(rule.tier), str(rule.component)] = rule
    for key, rule in tiered.items():
        if (nano := prices.get(key)) is not None:
            used = max(0, month.usage[key].tokens) if key in month.usage else 0
            yield from _steps_of(rule, used, nano, _multiply_discounts(month.rules, rule.model))


def _steps_of(rule: TermRule, used: int, nano: int, left: Fraction) -> Iterator[_Step]:
    """Yield the tiers of a term that tokens after `used` ones may reach."""
    ends = [tier.from_tokens for tier in rule.tiers[1:]]
    before = 0  # the price of the tier before
    for tier, end in zip(rule.tiers, [*ends, None], strict=True):
        if end is None or end > used:
            is_repriced = rule.term_type == TermType.VOLUME and 0 < tier.from_tokens >= used
            jump = max(0, tier.nano_per_million - before) * tier.from_tokens if is_repriced else 0
            own = tier.nano_per_million * left
            ratio = own / nano if nano else None if own else Fraction()
            yield _Step(max(0, tier.from_tokens - used) * nano, jump * left, ratio)
        before = tier.nano_per_million
