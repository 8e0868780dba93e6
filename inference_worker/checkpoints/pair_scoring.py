"""Decoders that are cross-encoders: a pair's score is the logit of a token such as "yes". Does not import torch.

Such a decoder has the module `LogitScore` of sentence-transformers, or is a Qwen3-Reranker whose model card names the
task text-ranking. The card's form of a pair then replaces the chat template, which is that of the chat model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_worker.checkpoints.model_config import ModelError, read_json
from inference_worker.checkpoints.tokenizer import read_core

QWEN3_TEMPLATE = """\
{%- set instruction = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first -%}
{%- set query = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first -%}
{%- set document = messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first -%}
{{- '<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query and the Instruct ' -}}
{{- 'provided. Note that the answer can only be "yes" or "no".<|im_end|>\\n<|im_start|>user\\n<Instruct>: ' -}}
{{- instruction or 'Given a web search query, retrieve relevant passages that answer the query' -}}
{{- '\\n<Query>: ' ~ query ~ '\\n<Document>: ' ~ document -}}
{{- '<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}
"""
RANKING_CARD = b"---\npipeline_tag: text-ranking\n---\n"  # all that is read of such a model card
_MAX_CARD_BYTES = 1 << 20
_RANKING = re.compile(r"^pipeline_tag:\s*[\"']?text-ranking\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PairScoring:
    """The tokens whose logits are a pair's score, and the template of a pair."""

    token: int  # id of the token of relevance
    other_token: int | None  # id of the token of irrelevance, whose logit is subtracted
    template: str  # replaces the model's chat template; empty: the chat template renders pairs


def read_pair_scoring(directory: Path, raw: dict[str, Any], modules: dict[str, str]) -> PairScoring | None:
    """Return how the decoder in the directory scores pairs, or None if it does not.

    Args:
        raw: config.json.
        modules: the directories of the modules in modules.json, by type.

    Raises:
        ModelError: a file is invalid.
    """
    if "LogitScore" in modules:
        path = directory / modules["LogitScore"] / "config.json"
        settings = read_json(path)
        token, other = settings.get("true_token_id"), settings.get("false_token_id")
        if not isinstance(token, int) or not isinstance(other, int | None):
            raise ModelError(f"{path}: true_token_id and false_token_id must be token ids")
        return PairScoring(token, other, "")
    if raw.get("architectures") != ["Qwen3ForCausalLM"] or modules or not is_ranking(directory / "README.md"):
        return None
    core = read_core(directory / "tokenizer.json")
    token, other = core.token_to_id("yes"), core.token_to_id("no")
    if token is None or other is None:
        raise ModelError(f"{directory}: a model of the task text-ranking needs the tokens yes and no in its tokenizer")
    return PairScoring(token, other, QWEN3_TEMPLATE)


def is_ranking(card: Path) -> bool:
    """Return whether the front matter of the model card names the task of ranking texts."""
    if not card.is_file() or card.stat().st_size > _MAX_CARD_BYTES:
        return False
    _, *front = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    return bool(front and _RANKING.search(front[0]))
