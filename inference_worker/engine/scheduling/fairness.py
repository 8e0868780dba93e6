"""Fair sharing between tenants: virtual token counters and expected output lengths. Does not import torch."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from fractions import Fraction

from inference_worker.contract.request import SamplingParams
from inference_worker.engine.scheduling.ordered import GrowingOrder

OUTPUT_WEIGHT = 2  # an output token counts as two prompt tokens
REMEMBERED_TENANTS = 10_000
_FIRST_GUESS = 256  # output tokens of a new tenant
_NEWEST_SHARE = 0.2  # weight of the newest output in the moving average


class TenantShare:
    """The account of one tenant.

    `served` is its virtual counter: served tokens divided by its weight. The tenant with the lowest counter is served
    next. The counter of an active tenant must not decrease, because the order of tenants depends on that.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.served = 0.0
        self.num_waiting = 0
        self.num_running = 0
        self._output_lengths: dict[int, float] = {}  # moving averages by prompt size in powers of two

    @property
    def active(self) -> bool:
        return self.num_waiting + self.num_running > 0

    def charge(self, prompt_tokens: int, output_tokens: int) -> None:
        """Add served tokens. Recomputed tokens are not charged, because tenants do not cause preemptions."""
        self.served += (prompt_tokens + OUTPUT_WEIGHT * output_tokens) / self.weight

    def expected_output(self, prompt_tokens: int, params: SamplingParams) -> float:
        """Return the expected output length, from the tenant's outputs for prompts of this size."""
        known = self._output_lengths.get(prompt_tokens.bit_length(), self._output_lengths.get(0, _FIRST_GUESS))
        return min(known, params.max_tokens)

    def note_output(self, prompt_tokens: int, output_tokens: int) -> None:
        for size in (prompt_tokens.bit_length(), 0):  # 0: all sizes
            old = self._output_lengths.get(size, float(output_tokens))
            self._output_lengths[size] = old + _NEWEST_SHARE * (output_tokens - old)


class FairShareTable:
    """The accounts of all tenants. If there are too many, those that were idle longest are removed.

    No method scans the tenants: active ones are sorted by their counters, and the sum of their weights is maintained.
    """

    def __init__(self) -> None:
        self._known: dict[str, TenantShare] = {}
        self._idle: OrderedDict[str, TenantShare] = OrderedDict()  # without requests; longest idle first
        self._active: GrowingOrder[TenantShare] = GrowingOrder(lambda tenant: tenant.served)
        self._numbers = itertools.count()
        self._exact_weight = Fraction(0)  # sum of the active tenants' weights; a float would accumulate rounding errors
        self._active_weight = 0.0

    def __getitem__(self, name: str) -> TenantShare:
        return self._known[name]

    def arrive(self, name: str, weight: float) -> TenantShare:
        """Return the account of the tenant of a new request. An idle tenant gets no credit for its idle time."""
        tenant = self._known.get(name)
        if tenant is None:
            self._forget()
            tenant = self._known[name] = self._idle[name] = TenantShare(name)
        if tenant.active:
            self._change_weight(Fraction(weight) - Fraction(tenant.weight))
        else:
            least = self._active.at(0)
            tenant.served = max(tenant.served, least.served if least else tenant.served)
        tenant.weight = weight
        return tenant

    def count(self, tenant: TenantShare, *, waiting: int = 0, running: int = 0) -> None:
        """Change the tenant's numbers of waiting and running requests by these differences."""
        was_active = tenant.active
        tenant.num_waiting += waiting
        tenant.num_running += running
        if tenant.active == was_active:
            return
        if was_active:
            self._active.discard(tenant)
            self._idle[tenant.name] = tenant
            self._change_weight(-Fraction(tenant.weight))
        else:
            del self._idle[tenant.name]
            self._active.add(tenant, next(self._numbers))
            self._change_weight(Fraction(tenant.weight))

    def share(self, name: str) -> float:
        """Return an active tenant's part of the active tenants' weights."""
        return self._known[name].weight / self._active_weight

    def active(self) -> list[TenantShare]:
        """Return the tenants with waiting or running requests. It scans the tenants, so it is only for checks and
        tests."""
        return list(self._active)

    def _change_weight(self, difference: Fraction) -> None:
        self._exact_weight += difference
        self._active_weight = float(self._exact_weight)

    def _forget(self) -> None:
        while len(self._known) >= REMEMBERED_TENANTS and self._idle:
            name, _ = self._idle.popitem(last=False)
            del self._known[name]
