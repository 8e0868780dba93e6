"""The bounds of the usage that an upstream reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_worker.contract.request import TokenCounts
from inference_worker.worker.relay.usage_bounds import bound_usage

NUMBERS = st.integers(0, 50) | st.integers(0, 2**31)


@given(st.lists(NUMBERS, min_size=5, max_size=5), NUMBERS, NUMBERS)
def test_usage_is_within_its_bounds_and_loses_no_more_than_is_above_them(
    counts: list[int], max_prompt: int, max_output: int
) -> None:
    reported = TokenCounts(*counts)
    found = bound_usage(reported, max_prompt, max_output)
    assert (found.prompt, found.output) == (min(reported.prompt, max_prompt), min(reported.output, max_output))
    assert bound_usage(found, max_prompt, max_output) == found
    if reported.prompt <= max_prompt:
        assert found == TokenCounts(*counts[:4], output=found.output)
    else:
        assert found.cache_write == 0
