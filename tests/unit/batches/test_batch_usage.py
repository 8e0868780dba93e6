"""The usage of a batch: the sum of its responses, of all endpoints."""

from __future__ import annotations

import json

from millrace.apps.batches.results import BatchUsage


def test_the_usage_of_all_endpoints_is_summed():
    usage = BatchUsage()
    chat = {
        **{"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14},
        **{"prompt_tokens_details": {"cached_tokens": 8}, "completion_tokens_details": {"reasoning_tokens": 3}},
    }
    response = {
        **{"input_tokens": 100, "output_tokens": 40, "total_tokens": 140},
        **{"input_tokens_details": {"cached_tokens": 80}, "output_tokens_details": {"reasoning_tokens": 30}},
    }
    for item in (chat, response, {"prompt_tokens": 1000, "total_tokens": 1000}, None):
        usage.add(json.dumps({"id": "x", "usage": item}).encode())
    usage.add(b"{}")
    assert usage.as_json() == {
        **{"input_tokens": 1110, "input_tokens_details": {"cached_tokens": 88}},
        **{"output_tokens": 44, "output_tokens_details": {"reasoning_tokens": 33}, "total_tokens": 1154},
    }
