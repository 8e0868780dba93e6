"""Tiny Qwen3 models with a trained tokenizer and a template with reasoning, written to a directory."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

CONTEXT = 2048
EOS, OPEN, CLOSE = "<|im_end|>", "<think>", "</think>"
MARKS = ("<|im_start|>", EOS, OPEN, CLOSE)
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


def write_reasoner(directory: Path) -> None:
    """Write a model with random weights. Its greedy output never has a mark, so that only a budget or the length limit
    ends a part."""
    tokenizer = _write_tokenizer(directory)
    model = _create_model(tokenizer, hidden_size=32, num_layers=2)
    with torch.no_grad():
        head = model.lm_head.weight.normal_()
        for token in range(len(head)):
            if (
                not tokenizer.decode([token], skip_special_tokens=False).isalpha()
                or tokenizer.id_to_token(token) in MARKS
            ):
                head[token] = 0  # the best logit of the others is positive
    model.save_pretrained(directory)


def write_scripted_reasoner(directory: Path, script: str) -> None:
    """Write a model whose greedy output after its template is `script`.

    The layer adds nothing, so the next token depends only on the last one. So the script's tokens must be distinct.
    """
    tokenizer = _write_tokenizer(directory)
    chain = tokenizer.encode(f"\n{script}").ids  # the template ends with a line break
    if len(set(chain)) < len(chain):
        raise ValueError(f"{script!r} repeats a token")
    model = _create_model(tokenizer, hidden_size=128, num_layers=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[chain[1:]] = rows[chain[:-1]]
    model.save_pretrained(directory)


def _create_model(tokenizer: Tokenizer, hidden_size: int, num_layers: int) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM  # here: takes 160 MB in each process that imports it

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=hidden_size,
            intermediate_size=48,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.token_to_id(EOS),
        )
    )


def _write_tokenizer(directory: Path) -> Tokenizer:
    directory.mkdir(parents=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": EOS, "model_max_length": CONTEXT, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def _train_tokenizer() -> Tokenizer:
    numbers = random.Random(0)
    words = ["".join(numbers.choices("abcdefgh", k=numbers.randrange(2, 8))) for _ in range(200)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(numbers.choices(words, k=20)) for _ in range(100)], trainer)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return tokenizer
