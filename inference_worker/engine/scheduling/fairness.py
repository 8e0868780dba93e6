"""Who has had how much: the tenants' virtual token counters, and how long their answers use to be. Free of torch."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from fractions import Fraction

from inference_worker.contract.request import SamplingParams
from inference_worker.engine.scheduling.ordered import GrowingOrder

OUTPUT_WEIGHT = 2  # an output token counts as two prompt tokens
REMEMBERED_TENANTS = 10_000
_FIRST_GUESS = 256  # output tokens of a tenant not seen before
_NEWEST_SHARE = 0.2  # of an answer just finished, in the moving average


class TenantShare:
    """One tenant's account.

    `served` is its virtual counter: tokens served over its weight. The tenant with the lowest goes next. While the
    tenant is active the counter only grows; the order of tenants depends on that.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.served = 0.0
        self.num_waiting = 0
        self.num_running = 0
        self._output_lengths: dict[int, float] = {}  # by size of the prompt in powers of two: a moving average

    @property
    def active(self) -> bool:
        return self.num_waiting + self.num_running > 0

    def charge(self, prompt_tokens: int, output_tokens: int) -> None:
        """Tokens were served. Recomputed ones are not: a preemption is not the tenant's doing."""
        self.served += (prompt_tokens + OUTPUT_WEIGHT * output_tokens) / self.weight

    def expected_output(self, prompt_tokens: int, params: SamplingParams) -> float:
        """How many tokens an answer will have, by the tenant's answers to prompts of that size so far."""
        known = self._output_lengths.get(prompt_tokens.bit_length(), self._output_lengths.get(0, _FIRST_GUESS))
        return min(known, params.max_tokens)

    def note_output(self, prompt_tokens: int, output_tokens: int) -> None:
        for size in (prompt_tokens.bit_length(), 0):  # 0: of all its answers
            old = self._output_lengths.get(size, float(output_tokens))
            self._output_lengths[size] = old + _NEWEST_SHARE * (output_tokens - old)


class FairShareTable:
    """The accounts of all tenants. When there are too many, those idle for longest are forgotten.

    No method scans the tenants: the active ones are kept in the order of their counters, and their weights summed up.
    """

    def __init__(self) -> None:
        self._known: dict[str, TenantShare] = {}
        self._idle: OrderedDict[str, TenantShare] = OrderedDict()  # without requests; idle for longest first
        self._active: GrowingOrder[TenantShare] = GrowingOrder(lambda tenant: tenant.served)
        self._numbers = itertools.count()
        self._exact_weight = Fraction(0)  # of the active tenants: a float would drift with each change
        self._active_weight = 0.0

    def __getitem__(self, name: str) -> TenantShare:
        return self._known[name]

    def arrive(self, name: str, weight: float) -> TenantShare:
        """Return the account of the tenant of a new request. An idle tenant gets no credit for the time it was idle."""
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
        """Change the numbers of the tenant's waiting and running requests by these differences."""
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
        """Return the tenants with requests waiting or running. For checks and tests: this one scans."""
        return list(self._active)

    def _change_weight(self, difference: Fraction) -> None:
        self._exact_weight += difference
        self._active_weight = float(self._exact_weight)

    def _forget(self) -> None:
        while len(self._known) >= REMEMBERED_TENANTS and self._idle:
            name, _ = self._idle.popitem(last=False)
            del self._known[name]
