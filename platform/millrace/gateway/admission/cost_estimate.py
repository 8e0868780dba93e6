"""The maximum cost of a request, estimated from its prompt and its output limit."""

from __future__ import annotations

import msgspec

from billing.rates.pricing import RateCard, reservation_nano
from billing.reservations.budget_leases import ReservedAmount
from millrace.gateway.admission.admission import AdmissionRequest

MAX_OUTPUT = 2**31 - 1  # tokens


class CostEstimate(msgspec.Struct, frozen=True):
    """The maximum cost of a request as a function of its output tokens.

    The candidates are alternatives: one is billed, and the reservation covers the most expensive.
    """

    demand: AdmissionRequest
    rate_cards: tuple[RateCard, ...]  # rate cards of the candidates with a price; the first is pinned

    def amount(self, max_tokens: int) -> ReservedAmount:
        """Return the amount that covers any usage with this output limit."""
        tokens = self.demand.prompt_tokens + max_tokens * self.demand.sequences
        return ReservedAmount(max(self._money(rate_card, max_tokens) for rate_card in self.rate_cards), tokens, 1)

    def affordable(self, left: ReservedAmount) -> int:
        """Return the number of output tokens that the remaining amount covers, by binary search."""
        low, high = 0, MAX_OUTPUT
        while low < high:
            middle = (low + high + 1) // 2
            money, tokens, _ = self.amount(middle)
            if money <= left.money and tokens <= left.tokens:
                low = middle
            else:
                high = middle - 1
        return low

    def _money(self, rate_card: RateCard, max_tokens: int) -> int:
        demand = self.demand
        return reservation_nano(
            rate_card,
            demand.prompt_tokens,
            max_tokens,
            demand.admitted_at,
            n=demand.sequences,
            writes_5m=demand.writes(300),
            writes_1h=demand.writes(3600),
            searches=demand.prompt.searches,
        )
