"""The text of new tokens, and the conditions that end a sequence. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items

from inference_worker.contract.request import FinishReason, RequestError, RequestOutput, TokenLogprobs
from inference_worker.engine.sequences.sequence import Sequence


def note_prompt_logprobs(seq: Sequence, start: int, found: Collection[TokenLogprobs]) -> None:
    """Store the log-probabilities of the prompt tokens after `start` until the first output.

    They are stored by position: a new computation after a preemption replaces earlier values.
    """
    seq.prompt_logprobs[start : start + len(found)] = found


def append_tokens(
    seq: Sequence,
    token_ids: Items[int],
    eos_token_ids: Collection[int],
    logprobs: Items[TokenLogprobs] = (),
    output: RequestOutput | None = None,
) -> RequestOutput:
    """Add tokens of one step to `seq` and return their output. Tokens after the last one of the output are dropped.

    Args:
        output: output of earlier tokens of the step, which is extended.

    Raises:
        GrammarFailed: the sequence cannot be continued under its grammar.
    """
    for index, token_id in enumerate(token_ids):
        following = append_token(seq, token_id, eos_token_ids, logprobs[index] if logprobs else None)
        if output is None:
            output = following
        else:
            output.token_ids += following.token_ids
            output.text += following.text
            output.reasoning += following.reasoning
            output.reasoning_tokens += following.reasoning_tokens
            output.logprobs += following.logprobs
            output.finish_reason, output.stop_reason = following.finish_reason, following.stop_reason
            output.usage = following.usage
        if output.finished:
            break
    if output is None:
        raise ValueError("a step returned no token")
    return output


def append_token(
    seq: Sequence, token_id: int, eos_token_ids: Collection[int], logprobs: TokenLogprobs | None = None
) -> RequestOutput:
    """Add `token_id` to `seq` and return the output. Set `seq.finish_reason` if the token is the last one.

    Raises:
        GrammarFailed: the sequence cannot be continued under its grammar.
    """
    seq.tokens.append(token_id)
    output = RequestOutput(
        seq.request_id,
        token_ids=[token_id],
        prompt_usage=seq.group.prompt_usage,
        scheduled_at=seq.scheduled_at,
        pins=seq.group.pins,
    )
    params, text, grammar, reasoning = seq.params, seq.detokenizer, seq.grammar, seq.reasoning
    is_reasoning = reasoning is not None and reasoning.take(token_id)
    if grammar is not None and not is_reasoning:
        grammar.accept(token_id)
    if logprobs is not None:
        output.logprobs.append(logprobs)
    if params.prompt_logprobs is not None and seq.index == 0 and seq.num_output_tokens == 1:
        output.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, []
    may_stop = seq.num_output_tokens > params.min_tokens
    # A token that ends the output is part of its text only with `include_stop`.
    is_stop_token = token_id in params.stop_token_ids and may_stop and not is_reasoning
    if is_stop_token or (token_id in eos_token_ids and not params.ignore_eos and may_stop):
        if params.include_stop and text is not None:
            output.text, output.reasoning = text.push(token_id, may_stop=False), text.reasoning
        return end(seq, output, "stop", token_id if is_stop_token else None)
    if text is not None:
        output.text = text.push(token_id, may_stop=may_stop)
        output.reasoning = text.reasoning
        if reasoning is not None:
            output.reasoning_tokens = reasoning.count(is_reasoning)
            output.logprobs = reasoning.release_logprobs(output.logprobs)
        if text.stopped_by is not None:
            return end(seq, output, "stop", text.stopped_by)
    if grammar is not None and not is_reasoning and grammar.complete:
        return end(seq, output, "stop")
    if seq.num_output_tokens >= params.max_tokens:
        return end(seq, output, "length")
    return output


def end(
    seq: Sequence, output: RequestOutput, reason: FinishReason, stop_reason: str | int | None = None
) -> RequestOutput:
    """Complete `output` as the request's last one: withheld text, finish reason and usage."""
    if seq.detokenizer is not None:
        output.text += seq.detokenizer.flush(is_truncated=reason == "length")
        output.reasoning += seq.detokenizer.reasoning
        if stop_reason is None and seq.detokenizer.stopped_by is not None:
            reason, stop_reason = "stop", seq.detokenizer.stopped_by
    if seq.reasoning is not None:
        output.logprobs = seq.reasoning.release_logprobs(output.logprobs, is_last=True)
    seq.finish_reason, seq.stop_reason = reason, stop_reason
    output.finish_reason, output.stop_reason, output.usage = reason, stop_reason, seq.usage()
    return output


def fail(seq: Sequence, code: str, message: str) -> RequestOutput:
    """Return the last output of a failed request."""
    return RequestOutput(seq.request_id, usage=seq.usage(), error=RequestError(code, message))
