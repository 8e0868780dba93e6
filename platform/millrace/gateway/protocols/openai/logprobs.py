"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.request import SamplingParams, TokenLogprobs

MIN_LOGPROB = -9999.0  # used for minus infinity, which JSON cannot represent


class TokenSpeller:
    """The texts of a text's tokens, and their offsets in it.

    A token that the text leaves out, such as a special token, has the offset of the next one. All tokens of one
    character have the character's offset.

    Args:
        continues: the text continues another one. Otherwise the decoder may omit the first token's space.
        shows_special: the text has special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool, shows_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._params = SamplingParams(skip_special_tokens=not shows_special)
        self.begin(0, continues=continues)

    def begin(self, offset: int, *, continues: bool) -> None:
        """Begin a text at this offset."""
        self._detokenizer = self._tokenizer.detokenizer(self._params, continues=continues)
        self._begins_text = not continues
        self._offset = offset  # characters before the next token

    def spell(self, token_id: int) -> bytes:
        """Return the bytes of a token that may be the next one."""
        return self._tokenizer.spell(token_id, begins_text=self._begins_text)

    def advance(self, token_id: int) -> int:
        """Append the next token and return its offset."""
        offset = self._offset
        self._offset += len(self._detokenizer.push(token_id))
        is_shown = not self._params.skip_special_tokens or self._tokenizer.is_continued([token_id])
        self._begins_text = self._begins_text and not is_shown
        return offset


def chat_logprobs(speller: TokenSpeller, items: Sequence[TokenLogprobs]) -> dict[str, Any]:
    content = []
    for item in items:
        top = [_entry(speller, token_id, logprob) for token_id, logprob in item.top]
        content.append({**_entry(speller, item.token_id, item.logprob), "top_logprobs": top})
        speller.advance(item.token_id)
    return {"content": content, "refusal": None}


def completion_logprobs(speller: TokenSpeller, items: Sequence[TokenLogprobs | int]) -> dict[str, Any]:
    """Return the logprobs object of the next tokens.

    Args:
        items: the tokens. A bare token ID is the first token of a prompt, which has no probability.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for item in items:
        token_id = item if isinstance(item, int) else item.token_id
        tokens.append(_name(speller.spell(token_id)))
        if isinstance(item, int):
            logprobs.append(None)
            tops.append(None)
        else:
            candidates = dict([*item.top, (item.token_id, item.logprob)])
            logprobs.append(max(MIN_LOGPROB, item.logprob))
            tops.append(
                {_name(speller.spell(candidate)): max(MIN_LOGPROB, value) for candidate, value in candidates.items()}
            )
        offsets.append(speller.advance(token_id))
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


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


def _entry(speller: TokenSpeller, token_id: int, logprob: float) -> dict[str, Any]:
    spelling = speller.spell(token_id)
    return {"token": _name(spelling), "logprob": max(MIN_LOGPROB, logprob), "bytes": list(spelling)}


def _name(spelling: bytes) -> str:
    """Return a token as text, or as bytes if it is a part of a character."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
