"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.request import TokenLogprobs

MIN_LOGPROB = -9999.0  # used for minus infinity, which JSON cannot represent


def chat_logprobs(tokenizer: Tokenizer, items: Sequence[TokenLogprobs]) -> dict[str, Any]:
    content = []
    for item in items:
        top = [_entry(tokenizer, token_id, logprob) for token_id, logprob in item.top]
        content.append({**_entry(tokenizer, item.token_id, item.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, items: Sequence[TokenLogprobs | int], offset: int
) -> tuple[dict[str, Any], int]:
    """Return the logprobs object, and the text offset of the next token.

    Args:
        items: the tokens. A bare token ID is the first token of a prompt, which has no probability.
        offset: the text offset of the first token.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for item in items:
        token_id = item if isinstance(item, int) else item.token_id
        offsets.append(offset)
        tokens.append(_name(tokenizer.spell(token_id)))
        offset += len(tokens[-1])
        if isinstance(item, int):
            logprobs.append(None)
            tops.append(None)
            continue
        candidates = dict([*item.top, (item.token_id, item.logprob)])
        logprobs.append(max(MIN_LOGPROB, item.logprob))
        tops.append(
            {_name(tokenizer.spell(candidate)): max(MIN_LOGPROB, logprob) for candidate, logprob in candidates.items()}
        )
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}, offset


def prompt_logprobs(tokenizer: Tokenizer, items: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt's tokens in vLLM's format. The first token has none."""
    found: list[dict[str, Any] | None] = [None]
    for item in items:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(item.top, 1)]
        candidates = {token_id: (logprob, rank) for token_id, logprob, rank in ranked}
        candidates[item.token_id] = item.logprob, item.rank
        found.append(
            {
                str(token_id): {
                    "logprob": max(MIN_LOGPROB, logprob),
                    "rank": rank,
                    "decoded_token": _name(tokenizer.spell(token_id)),
                }
                for token_id, (logprob, rank) in candidates.items()
            }
        )
    return found


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    spelling = tokenizer.spell(token_id)
    return {"token": _name(spelling), "logprob": max(MIN_LOGPROB, logprob), "bytes": list(spelling)}


def _name(spelling: bytes) -> str:
    """Return a token as text, or as bytes if it is a part of a character."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
