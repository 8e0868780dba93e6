"""Who has had how much: the tenants' virtual token counters, and how long their answers use to be. Free of torch."""

from __future__ import annotations

from collections import OrderedDict

from inference_worker.engine.request import SamplingParams

OUTPUT_WEIGHT = 2  # an output token counts as two prompt tokens
REMEMBERED_TENANTS = 10_000
_FIRST_GUESS = 256  # output tokens of a tenant not seen before
_NEWEST_SHARE = 0.2  # of an answer just finished, in the moving average


class TenantShare:
    """One tenant's account.

    `served` is its virtual counter: tokens served over its weight. The tenant with the lowest goes next.
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


class Tenants:
    """All tenants' accounts. Those gone longest are forgotten when there are too many."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, TenantShare] = OrderedDict()
        self._active: dict[str, TenantShare] = {}  # and some that were so lately

    def __getitem__(self, name: str) -> TenantShare:
        return self._known[name]

    def arrive(self, name: str, weight: float) -> TenantShare:
        """The account of a tenant whose request has come; one that was idle gets no credit for that time."""
        tenant = self._known.get(name)
        if tenant is None:
            tenant = self._known[name] = TenantShare(name)
            self._forget()
        self._known.move_to_end(name)
        tenant.weight = weight
        if not tenant.active:
            least = min((other.served for other in self.active()), default=tenant.served)
            tenant.served = max(tenant.served, least)
            self._active[name] = tenant
        return tenant

    def active(self) -> list[TenantShare]:
        """Tenants with requests waiting or running."""
        for name in [name for name, tenant in self._active.items() if not tenant.active]:
            del self._active[name]
        return list(self._active.values())

    def _forget(self) -> None:
        if len(self._known) > REMEMBERED_TENANTS:
            gone = next((t for t in self._known.values() if not t.active), None)
            if gone is not None:
                del self._known[gone.name]
