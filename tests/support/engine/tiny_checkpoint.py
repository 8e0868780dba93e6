"""A tiny Llama with random weights and a byte-level tokenizer, written to a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.engine.tiny_tokenizer import write_tokenizer


def write_model(directory: Path, marks: Sequence[str], chat_template: str | None = None) -> None:
    """Write a model with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM  # here: takes 160 MB in each process that imports it

    write_tokenizer(directory, marks, chat_template)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
