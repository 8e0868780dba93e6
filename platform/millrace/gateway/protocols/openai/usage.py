"""OpenAI's usage object, whose prompt_tokens include tokens that were read from the cache."""

from __future__ import annotations

from typing import Any

from inference_worker.contract.messages import End
from inference_worker.contract.request import TokenCounts


def usage_object(usage: TokenCounts, reasoning_tokens: int = 0, end: End | None = None) -> dict[str, Any]:
    """Return the usage object.

    Args:
        end: of a complete response. It has the numbers of accepted and rejected draft tokens.
    """
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.total,
        "prompt_tokens_details": {
            "cached_tokens": usage.cache_read,
            "cache_write_tokens": usage.cache_write,
        },
        "completion_tokens_details": {
            "reasoning_tokens": min(reasoning_tokens, usage.output),
            "accepted_prediction_tokens": end.accepted_drafts if end else 0,
            "rejected_prediction_tokens": end.rejected_drafts if end else 0,
        },
    }
