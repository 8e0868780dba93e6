"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference_worker.contract.request import TokenLogprobs
from inference_worker.contract.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no minus infinity: what a token gets that could not have been chosen


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
    content = []
    for each in found:
        top = [_entry(tokenizer, token_id, logprob) for token_id, logprob in each.top]
        content.append({**_entry(tokenizer, each.token_id, each.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, found: Sequence[TokenLogprobs | int], offset: int
) -> tuple[dict[str, Any], int]:
    """Return the object, and where the next token's text begins. A bare token id is one that nothing stands before,
    and so has no probability. `offset`: where in the answer's text the first token's begins."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for each in found:
        token_id = each if isinstance(each, int) else each.token_id
        offsets.append(offset)
        tokens.append(_name(tokenizer.spell(token_id)))
        offset += len(tokens[-1])
        if isinstance(each, int):
            logprobs.append(None)
            tops.append(None)
            continue
        chances = dict([*each.top, (each.token_id, each.logprob)])
        logprobs.append(max(MIN_LOGPROB, each.logprob))
        tops.append({_name(tokenizer.spell(one)): max(MIN_LOGPROB, logprob) for one, logprob in chances.items()})
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}, offset


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    spelling = tokenizer.spell(token_id)
    return {"token": _name(spelling), "logprob": max(MIN_LOGPROB, logprob), "bytes": list(spelling)}


def _name(spelling: bytes) -> str:
    """Return a token as text; one that is a part of a character by its bytes."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
