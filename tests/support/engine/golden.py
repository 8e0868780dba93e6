"""Golden outputs of transformers in float32 for 200 real prompts. The engine's output must be equal, token by token."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

DATA = Path(__file__).parents[2] / "data" / "engine"
PROMPTS = DATA / "prompts.jsonl.gz"
GOLDEN = DATA / "greedy_golden.json.gz"
NEW_TOKENS = 48
NEAR_TIE = 1e-4  # if the two best logits are closer than this, either token is correct


@dataclass(frozen=True)
class Golden:
    """The greedy continuation of one prompt. It continues after EOS, since later tokens are equally good tests."""

    id: str
    prompt_token_ids: list[int]
    tokens: list[int]
    near_ties: list[int]  # positions in `tokens` whose two best logits were closer than NEAR_TIE


def read_prompts() -> list[dict[str, str]]:
    """Return `id` and `text` of the 200 prompts."""
    with gzip.open(PROMPTS, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def read_golden() -> list[Golden]:
    with gzip.open(GOLDEN, "rt", encoding="utf-8") as file:
        return [Golden(**entry) for entry in json.load(file)["answers"]]


def write_golden(answers: list[Golden], made_with: dict[str, str], path: Path = GOLDEN) -> None:
    content = {"made_with": made_with, "new_tokens": NEW_TOKENS, "answers": [asdict(a) for a in answers]}
    # No time stamp, so that equal outputs make equal files.
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        file.write(json.dumps(content, separators=(",", ":")).encode())


def generate(model_dir: Path, prompts: list[dict[str, str]]) -> Iterator[Golden]:
    """Generate the output of each prompt separately with transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt["text"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        tokens: list[int] = []
        near_ties: list[int] = []
        past, given = None, ids
        with torch.inference_mode():
            while len(tokens) < NEW_TOKENS:
                result = model(torch.tensor([given]), past_key_values=past, use_cache=True, logits_to_keep=1)
                best = result.logits[0, -1].topk(2)
                if float(best.values[0] - best.values[1]) < NEAR_TIE:
                    near_ties.append(len(tokens))
                tokens.append(int(best.indices[0]))
                past, given = result.past_key_values, tokens[-1:]
        yield Golden(prompt["id"], list(ids), tokens, near_ties)


def recompute(
    model_dir: Path, prompts: list[dict[str, str]], golden: dict[str, Golden]
) -> Iterator[tuple[Golden, list[int]]]:
    """Yield each golden output and the best token of transformers at each position, given the tokens before it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt["text"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        answer = golden[prompt["id"]]
        with torch.inference_mode():
            logits = model(torch.tensor([ids + answer.tokens]), logits_to_keep=len(answer.tokens) + 1).logits
        yield answer, logits[0, :-1].argmax(-1).tolist()


def first_difference(golden: Golden, tokens: list[int]) -> int | None:
    """Return the first position at which `tokens` differ from the golden output, or None.

    The comparison ends at a near tie that was decided differently, since the texts differ from there on.
    """
    for place, (wanted, got) in enumerate(zip(golden.tokens, tokens, strict=True)):
        if wanted != got:
            return None if place in golden.near_ties else place
    return None
