"""The measured duration of steps by their number of tokens. Does not import torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection

_MIN_SAMPLES = 3  # a size with fewer durations is not used, as one disturbed step would decide
_MAX_SAMPLES = 16
_MAX_AGE = 500  # steps after which the durations of a size are forgotten, so that it can be tried again
# The assumed share of a step with one token that each other token costs, before a measurement.
_FIRST_GUESS = 0.06


class StepCosts:
    """The duration of steps in which every token is sampled: decodes and verified drafts.

    The estimate of a size is the lower quartile of its durations. Unlike the minimum, it does not depend on how often
    the size was measured. A size is the number of tokens of a step.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._steps = 0
        self._quartiles: dict[int, float] = {}
        # Durations of rarely measured sizes, relative to their estimates: a batch's drafts make many sizes.
        self._ratios: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._sizes: list[int] = []  # sorted keys of the quartiles
        self._seconds: list[float] = []  # the estimates of these sizes

    def observe(self, num_tokens: int, seconds: float) -> None:
        if seconds <= 0:  # below the timer's resolution
            return
        self._steps += 1
        self._measured_at[num_tokens] = self._steps
        samples = self._samples.setdefault(num_tokens, deque(maxlen=_MAX_SAMPLES))
        samples.append(seconds)
        if self._sizes and num_tokens not in self._quartiles:
            self._ratios.append(seconds / self._interpolate(num_tokens))
        if self._steps % _MAX_AGE == 0:
            self._ratios.clear()
        for size in [size for size, at in self._measured_at.items() if self._steps - at > _MAX_AGE]:
            del self._samples[size], self._measured_at[size]
            self._quartiles.pop(size, None)
        if len(samples) >= _MIN_SAMPLES:
            self._quartiles[num_tokens] = _lower_quartile(samples)
        self._sizes = sorted(self._quartiles)
        self._seconds = [self._quartiles[size] for size in self._sizes]
        # A step with fewer tokens is not slower.
        for index in range(len(self._seconds) - 1, 0, -1):
            self._seconds[index - 1] = min(self._seconds[index - 1], self._seconds[index])

    @property
    def is_measured(self) -> bool:
        """Return whether estimates are seconds."""
        return bool(self._sizes)

    def estimate(self, num_tokens: int) -> float:
        """Return the duration of a step with this number of tokens; the unit is arbitrary if none was measured.

        Between two measured sizes the duration is linear. Beyond them, each token costs as in the guess. Both are
        corrected by the durations of other such sizes.
        """
        if num_tokens in self._quartiles or len(self._ratios) < _MIN_SAMPLES:
            return self._interpolate(num_tokens)
        return self._interpolate(num_tokens) * max(1.0, _lower_quartile(self._ratios))

    def _interpolate(self, num_tokens: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return _guess(num_tokens)
        index = bisect_left(sizes, num_tokens)
        if index < len(sizes) and sizes[index] == num_tokens:
            return seconds[index]
        if index == 0:
            return seconds[0] * _guess(num_tokens) / _guess(sizes[0])
        if index == len(sizes):
            return seconds[-1] * _guess(num_tokens) / _guess(sizes[-1])
        low, high = sizes[index - 1], sizes[index]
        share = (num_tokens - low) / (high - low)
        return seconds[index - 1] * (1 - share) + seconds[index] * share


def _lower_quartile(values: Collection[float]) -> float:
    return sorted(values)[(len(values) + 1) // 4 - 1]


def _guess(num_tokens: int) -> float:
    return 1 + _FIRST_GUESS * (num_tokens - 1)
