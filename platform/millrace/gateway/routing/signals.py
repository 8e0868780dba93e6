"""What the router measures of a target: estimated cost, time to the first token and load."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from billing.currencies.amounts import whole_units
from billing.rates.pricing import PriceIndex, Tier, UnknownPriceError, price
from inference_worker.contract.request import TokenCounts
from millrace.gateway.core.catalog import ServedModel
from tenants.routing_policies.strategies import TargetMeasures

HALF_LIFE_SECONDS = 60.0  # half-life of a measured latency
MIN_WEIGHT = 0.05  # sum of the weights of a target's measurements; below it, its latency is unknown


@dataclass(frozen=True)
class RequestSize:
    """The properties of a request that its cost and its fit depend on."""

    tenant_id: int
    prompt_tokens: int
    max_tokens: int | None
    has_images: bool
    tier: Tier
    at: int  # microseconds since 1970


class LatencyTracker:
    """The mean time to the first token of each deployment, in which later measurements weigh more."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float, float]] = {}  # name -> (weight, weighted seconds, monotonic time)

    def record(self, model: str, seconds: float, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        weight, total = self._decay_sums(model, now)
        self._sums[model] = (weight + 1, total + seconds, now)

    def milliseconds(self, model: str, now: float | None = None) -> float | None:
        """Return the mean, or None if there is no recent measurement."""
        weight, total = self._decay_sums(model, time.monotonic() if now is None else now)
        return total / weight * 1000 if weight >= MIN_WEIGHT else None

    def _decay_sums(self, model: str, now: float) -> tuple[float, float]:
        weight, total, at = self._sums.get(model, (0.0, 0.0, now))
        factor = 0.5 ** (max(0.0, now - at) / HALF_LIFE_SECONDS)
        return weight * factor, total * factor


class TargetSignals:
    """The measures of one gateway."""

    def __init__(
        self, prices: PriceIndex, latencies: LatencyTracker, relative_load: Callable[[str], float | None]
    ) -> None:
        """Create the signals. `relative_load` returns the requests per slot of a deployment, by its key."""
        self._prices = prices
        self._relative_load = relative_load
        self._latencies = latencies

    def measure(self, model: ServedModel, size: RequestSize) -> TargetMeasures:
        """Return the measures of a deployment for a request."""
        output = model.default_max_output if size.max_tokens is None else size.max_tokens
        needed = size.prompt_tokens + (1 if size.max_tokens is None else size.max_tokens)
        return TargetMeasures(
            fits=needed <= model.context_length and (model.upstream is not None or not size.has_images),
            cost_nano=self._cost(model.name, size, output),
            ttft_ms=self._latencies.milliseconds(model.name),
            load=self._relative_load(model.key),
        )

    def _cost(self, model: str, size: RequestSize, output: int) -> int | None:
        rate_card = self._prices.find(size.tenant_id, model, size.tier, size.at)
        if rate_card is None:
            return None
        try:
            counts = TokenCounts(uncached=size.prompt_tokens, output=output)
            return whole_units(price(rate_card, counts, size.at).cost_femto)
        except UnknownPriceError:
            return None
