"""Charges for tokens that an upstream reports, up to the reservation. Does not import Django.

Millrace's own engine never exceeds a reservation. An upstream may count more tokens than it was reserved for.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import astuple

from billing.currencies.amounts import FEMTO_A_NANO
from billing.rates.pricing import (
    COMPONENTS,
    OUTPUTS,
    PLAIN,
    Component,
    Rate,
    RateCard,
    Rated,
    UnknownPriceError,
    prices,
)
from inference_worker.contract.messages import BillingContext
from inference_worker.contract.request import TOKEN_CLASSES, TokenCounts
from inference_worker.contract.texts import Text


class ChargedUsage(NamedTuple):
    """The tokens that a tenant is charged for, and what is above its reservation."""

    counts: TokenCounts
    rated: Rated
    unbilled_tokens: int
    unbilled_femto: int  # the price of the unbilled tokens


def charge(
    rate_card: RateCard | None, counts: TokenCounts, at: int, *, max_femto: int | None, max_tokens: int | None
) -> ChargedUsage:
    """Return the charge for an execution's tokens, admitted at that microsecond. A limit of None does not apply.

    Tokens are charged in the order of COMPONENTS. Prompt tokens of a class without a price count as uncached. The
    prices are those of the reported prompt's length.

    Args:
        rate_card: None charges nothing for the tokens.

    Raises:
        UnknownPriceError: uncached or output tokens have no price.
    """
    tokens = list(astuple(counts))
    rates = {} if rate_card is None else prices(rate_card, counts.prompt + counts.answer_hit_input, at)
    if rate_card is not None:
        _fold_unpriced(rate_card, rates, tokens)
    charged = [0] * len(tokens)
    price_ids: list[int | None] = [None] * len(tokens)
    cost = saved = unbilled = used = 0
    for number, (component, count) in enumerate(zip(COMPONENTS, tokens, strict=True)):
        if not count:
            continue
        rate = rates.get(component)
        nano = 0 if rate is None else rate.nano_per_million
        fitting = count
        if max_femto is not None and nano:
            fitting = min(fitting, (max_femto - cost) // nano)
        if max_tokens is not None and component in TOKEN_CLASSES:
            fitting = min(fitting, max_tokens - used)
            used += fitting
        charged[number] = fitting
        unbilled += (count - fitting) * nano
        if fitting and rate is not None:
            plain = rates.get(PLAIN[component], rate)
            price_ids[number] = rate.price_id
            cost += fitting * nano
            saved += fitting * (plain.nano_per_million - nano)
    rated = Rated(None if rate_card is None else price_ids, cost, saved)
    return ChargedUsage(TokenCounts(*charged), rated, sum(tokens) - sum(charged), unbilled)


def reserved_by(billing_context: BillingContext) -> tuple[int | None, int | None]:
    """Return the reserved nano-USD and tokens of an execution. None: it has no such limit."""
    if billing_context.lease_id is None:
        return billing_context.reserved_nano, billing_context.reserved_tokens
    return billing_context.reserved_nano or 0, billing_context.reserved_tokens or 0


def charge_within_reservation(rate_card: RateCard | None, counts: TokenCounts, context: BillingContext) -> ChargedUsage:
    """Return the charge for the tokens of an upstream's execution. The gateway and the settler compute it in this way.

    Raises:
        UnknownPriceError: uncached or output tokens have no price.
    """
    max_nano, max_tokens = reserved_by(context)
    max_femto = None if max_nano is None else max_nano * FEMTO_A_NANO
    return charge(rate_card, counts, context.admitted_at, max_femto=max_femto, max_tokens=max_tokens)


def _fold_unpriced(rate_card: RateCard, rates: dict[Component, Rate], tokens: list[int]) -> None:
    """Count the prompt tokens of classes without a price as uncached.

    Raises:
        UnknownPriceError: uncached or output tokens have no price.
    """
    for number, component in enumerate(COMPONENTS):
        if not tokens[number] or component in rates or component.is_optional:
            continue
        if component not in TOKEN_CLASSES or component in OUTPUTS or Component.UNCACHED not in rates:
            raise UnknownPriceError(
                Text(
                    "%(model)s (%(tier)s) has no price for %(component)s",
                    model=rate_card.model,
                    tier=rate_card.tier,
                    component=component,
                )
            )
        tokens[0] += tokens[number]
        tokens[number] = 0
