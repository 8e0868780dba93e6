"""The rate limits in the headers of upstreams."""

from __future__ import annotations

import pytest

from inference_worker.worker.relay.rate_limit_headers import reported_limits

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-remaining-requests": "59",
                "x-ratelimit-reset-requests": "1s",
                "x-ratelimit-limit-tokens": "150000",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "6m0.5s",
            },
            [("requests", 60, 59, 1.0), ("tokens", 150_000, 149_984, 360.5)],
        ),
        (
            {
                "anthropic-ratelimit-requests-limit": "50",
                "anthropic-ratelimit-requests-remaining": "0",
                "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:30Z",
                "anthropic-ratelimit-input-tokens-limit": "40000",
                "anthropic-ratelimit-input-tokens-remaining": "1000",
                "anthropic-ratelimit-input-tokens-reset": "2027-01-15T07:59:00Z",
            },
            [("requests", 50, 0, 30.0), ("tokens", 40_000, 1000, 0.0)],
        ),
        # Without a limit, a reset in milliseconds or as a number of seconds, and one of days.
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "20ms"}, [("requests", 1, 0, 0.02)]),
        ({"x-ratelimit-remaining-tokens": "7", "x-ratelimit-reset-tokens": "12"}, [("tokens", 7, 7, 12.0)]),
        ({"x-ratelimit-remaining-tokens": "7", "x-ratelimit-reset-tokens": "9d"}, [("tokens", 7, 7, 86_400.0)]),
        # Not complete, not numbers, too long.
        ({"x-ratelimit-remaining-requests": "0"}, []),
        ({"x-ratelimit-remaining-requests": "-1", "x-ratelimit-reset-requests": "1s"}, []),
        ({"x-ratelimit-remaining-requests": "5", "x-ratelimit-reset-requests": "nan"}, []),
        ({"x-ratelimit-remaining-requests": "5", "x-ratelimit-reset-requests": "2027-01-15T08:00:30"}, []),
        ({"x-ratelimit-remaining-requests": "5", "x-ratelimit-reset-requests": "soon"}, []),
        ({"x-ratelimit-remaining-requests": "1" * 65, "x-ratelimit-reset-requests": "1s"}, []),
    ],
)
def test_limits_are_read(headers: dict[str, str], expected: list[tuple[str, int, int, float]]) -> None:
    found = reported_limits(headers, NOW)
    assert [limit[:3] for limit in found] == [limit[:3] for limit in expected]
    assert [limit.reset_seconds for limit in found] == pytest.approx([limit[3] for limit in expected])
