"""A tiny Qwen3 with random weights, a trained tokenizer and a template with reasoning, written to a directory."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

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
    """Write the model. Its greedy output never has a mark, so that only a budget or the length limit ends a part."""
    directory.mkdir(parents=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": EOS, "model_max_length": CONTEXT, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        head = model.lm_head.weight.normal_()
        for token in range(len(head)):
            if (
                not tokenizer.decode([token], skip_special_tokens=False).isalpha()
                or tokenizer.id_to_token(token) in MARKS
            ):
                head[token] = 0  # the best logit of the others is positive
    model.save_pretrained(directory)


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
