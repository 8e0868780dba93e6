"""Bounds of the usage that a request can have, which apply to what an upstream reports."""

from __future__ import annotations

from dataclasses import replace

import structlog

from inference_worker.contract.messages import InferenceJob
from inference_worker.contract.request import PROMPT_CLASSES, RequestError, RequestOutput, TokenCounts
from inference_worker.contract.upstreams import UpstreamSpec

log = structlog.get_logger(__name__)


class UsageBounds:
    """The bounds of one execution's usage: the tokens that admission has reserved for its prompt and its output."""

    def __init__(self, job: InferenceJob, upstream: UpstreamSpec) -> None:
        if job.upstream is None:
            raise AssertionError("the job has a request to an upstream")
        answers = 0 if job.upstream.operation == "embeddings" else job.params.n
        self._context = job.billing_context
        self._max_prompt = job.upstream.prompt_tokens
        self._max_output = answers * job.params.max_tokens
        # A model cannot read or write more, so the operator's cost has no more tokens either.
        self._longest_prompt = max(self._max_prompt, upstream.context_length)
        self._longest_output = max(self._max_output, answers * upstream.context_length)

    def apply(self, outcome: RequestOutput | RequestError) -> RequestOutput | RequestError:
        """Return the outcome with usage within the bounds. Its `reported_usage` is set if the usage was above them."""
        reported = outcome.usage
        usage = None if reported is None else bound_usage(reported, self._max_prompt, self._max_output)
        if reported is not None and usage != reported:
            fields = {
                "prompt_tokens": reported.prompt,
                "output_tokens": reported.output,
                "source": outcome.usage_source,
            }
            log.warning("upstream_usage_above_bounds", **self._context.log_fields(), **fields)
            reported = bound_usage(reported, self._longest_prompt, self._longest_output)
            outcome = replace(outcome, usage=usage, reported_usage=reported)
        if isinstance(outcome, RequestOutput) and outcome.prompt_usage is not None:
            outcome.prompt_usage = bound_usage(outcome.prompt_usage, self._max_prompt, 0)
        return outcome


def bound_usage(counts: TokenCounts, max_prompt: int, max_output: int) -> TokenCounts:
    """Return the counts with at most these tokens.

    The classes of a prompt above its bound are not trusted. Cache writes then count as uncached tokens, since the
    reservation does not cover their price.
    """
    output = min(counts.output, max_output)
    if counts.prompt <= max_prompt:
        return TokenCounts(**{name: getattr(counts, name) for name in PROMPT_CLASSES}, output=output)
    uncached = min(counts.uncached + counts.cache_write, max_prompt)
    return TokenCounts(uncached, min(counts.cache_read, max_prompt - uncached), output=output)
