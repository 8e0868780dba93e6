"""Encoders and cross-encoders against transformers, on small models with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from inference_worker.checkpoints.encoder_config import EncoderConfig, read_model_config
from inference_worker.checkpoints.model_config import ModelConfig, ModelError
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, RequestRejected, TokenCounts
from inference_worker.engine.architectures import encoder
from inference_worker.engine.compute_path import choose_path
from inference_worker.engine.embeddings.embedding_engine import EmbeddingEngine
from inference_worker.engine.embeddings.embedding_runner import EmbeddingRunner
from kernels.native import operators
from tests.support.engine.tiny_tokenizer import write_tokenizer

# Names of classes in transformers, and the fields of their configurations.
Fields = dict[str, Any]
SMALL: Fields = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
BERT: Fields = {**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 64}
ROBERTA: Fields = {
    **SMALL,
    "num_hidden_layers": 2,
    "max_position_embeddings": 66,
    "type_vocab_size": 1,
    "pad_token_id": 1,
}
TOKENS: Fields = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
LOCAL: Fields = {"num_hidden_layers": 4, "local_attention": 8}
MODERN: Fields = {**SMALL, **TOKENS, **LOCAL, "max_position_embeddings": 64, "initializer_range": 0.2}
ENCODERS: dict[str, tuple[str, Fields]] = {
    "bert": ("BertModel", BERT),
    "xlm-roberta": ("XLMRobertaModel", ROBERTA),
    "modernbert": ("ModernBertModel", MODERN),
}
CROSS_ENCODERS: dict[str, tuple[str, Fields]] = {
    "bert": ("BertForSequenceClassification", BERT),
    "roberta": ("RobertaForSequenceClassification", ROBERTA),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", ROBERTA),
    "modernbert": ("ModernBertForSequenceClassification", MODERN),
}
LENGTHS = (64, 3, 61, 12, 57, 3, 1, 40)


def inputs(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randint(3, 120, (length,), generator=numbers).tolist() for length in lengths]


def save(folder: Path, name: str, fields: Fields, **changes: Any) -> Any:
    """Save a model of transformers with random weights and biases, and return it."""
    import transformers  # here: its models take 160 MB, and each process of `pytest -n` imports this file

    torch.manual_seed(0)
    type_ = getattr(transformers, name)
    model = type_(type_.config_class(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    change(folder, **changes)
    return model


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def pool(folder: Path, mode: str) -> None:
    modules = [{"type": f"a.{name}", "path": f"{n}_{name}"} for n, name in enumerate(("Transformer", "Pooling"))]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({mode: True}))


def runner(folder: Path) -> EmbeddingRunner:
    return EmbeddingRunner(EngineConfig(model_dir=folder), EncoderConfig.from_dir(folder))


@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_equal_transformers_with_both_poolings(tmp_path: Path, family: str) -> None:
    model = save(tmp_path, *ENCODERS[family])
    read = EncoderConfig.from_dir(tmp_path)
    assert (read.max_model_len, read.pooling, read.normalize) == (64, "mean", False)
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in inputs()]
    mean = torch.from_numpy(runner(tmp_path).embed(inputs()))
    torch.testing.assert_close(mean, torch.stack([state.mean(0) for state in states]), atol=1e-5, rtol=1e-5)
    pool(tmp_path, "pooling_mode_cls_token")
    cls = torch.from_numpy(runner(tmp_path).embed(inputs()))
    torch.testing.assert_close(cls, torch.stack([state[0] for state in states]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_scores_equal_transformers_and_do_not_depend_on_the_batch(tmp_path: Path, family: str) -> None:
    name, fields = CROSS_ENCODERS[family]
    model = save(tmp_path, name, fields | {"num_labels": 1})
    starts = [max(1, len(ids) // 3) for ids in inputs()]
    want = []
    for ids, start in zip(inputs(), starts, strict=True):
        types = torch.tensor([[int(place >= start) for place in range(len(ids))]])
        pair = {"token_type_ids": types} if family == "bert" else {}
        with torch.inference_mode():
            want.append(model(torch.tensor([ids]), **pair).logits[0])
    ours = runner(tmp_path)
    scores = torch.from_numpy(ours.embed(inputs(), starts))
    torch.testing.assert_close(scores, torch.stack(want).sigmoid(), atol=1e-5, rtol=1e-5)
    single = [ours.embed([ids], [start]) for ids, start in zip(inputs(), starts, strict=True)]
    torch.testing.assert_close(scores, torch.from_numpy(np.concatenate(single)), atol=1e-6, rtol=1e-6)
    change(tmp_path, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    raw = torch.from_numpy(runner(tmp_path).embed(inputs(), starts))
    torch.testing.assert_close(raw, torch.stack(want), atol=1e-5, rtol=1e-5)


DECODER: Fields = {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2}
DECODERS: dict[str, tuple[str, Fields]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 16}),
    "windows": ("MistralForCausalLM", DECODER | {"sliding_window": 8}),
}


@pytest.mark.parametrize("family", DECODERS)
def test_vectors_of_decoders_equal_transformers(tmp_path: Path, family: str) -> None:
    """The pooling is the last token's state. The names of the weights lack their prefix in some checkpoints."""
    name, fields = DECODERS[family]
    model = save(tmp_path, name, fields)
    pool(tmp_path, "pooling_mode_lasttoken")
    states = []
    for ids in inputs():
        with torch.inference_mode():
            states.append(model.model(torch.tensor([ids])).last_hidden_state[0, -1])
    read = EncoderConfig.from_dir(tmp_path)
    assert (read.pooling, read.hidden_size, read_model_config(tmp_path)) == ("last", 32, read)
    ours = torch.from_numpy(runner(tmp_path).embed(inputs()))
    torch.testing.assert_close(ours, torch.stack(states), atol=1e-5, rtol=1e-5)
    save(tmp_path, type(model.model).__name__, fields, architectures=[name])
    torch.testing.assert_close(torch.from_numpy(runner(tmp_path).embed(inputs())), ours)


WIDE: Fields = {**SMALL, "hidden_size": 64, "num_attention_heads": 2}  # heads of 32, which the C kernels support
NATIVE: dict[str, tuple[str, Fields]] = {
    "bert": ("BertModel", {**WIDE, "num_hidden_layers": 2}),
    "modernbert": ("ModernBertModel", {**WIDE, **TOKENS, **LOCAL}),
    "qwen3": ("Qwen3ForCausalLM", {**WIDE, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 32}),
}


@pytest.mark.parametrize("family", NATIVE)
def test_vectors_in_bfloat16_on_the_c_kernels_equal_transformers(tmp_path: Path, family: str) -> None:
    model = save(tmp_path, *NATIVE[family])
    if family == "qwen3":
        pool(tmp_path, "pooling_mode_lasttoken")
    states = []
    for ids in inputs():
        with torch.inference_mode():
            state = getattr(model, "model", model)(torch.tensor([ids])).last_hidden_state[0]
        states.append(state[-1] if family == "qwen3" else state.mean(0))
    choose_path(EngineConfig(model_dir=tmp_path, dtype="bfloat16"))  # checks the kernels at the first load
    attend = operators.SelfAttention.attend
    with mock.patch.object(operators.SelfAttention, "attend", autospec=True, side_effect=attend) as attended:
        config = EngineConfig(model_dir=tmp_path, dtype="bfloat16")
        vectors = torch.from_numpy(EmbeddingRunner(config, read_model_config(tmp_path)).embed(inputs()))
    assert attended.call_count == NATIVE[family][1]["num_hidden_layers"]
    assert torch.cosine_similarity(vectors, torch.stack(states)).min() > 0.9995


def test_a_decoder_with_a_soft_cap_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, "Gemma2ForCausalLM", DECODER | {"head_dim": 8})
    pool(tmp_path, "pooling_mode_lasttoken")
    with pytest.raises(ModelError, match="soft cap"):
        runner(tmp_path)


INSTRUCTED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def causal_cross_encoder(folder: Path, *, tied: bool) -> Any:
    """Save a small decoder with a byte tokenizer in which the words yes and no are tokens."""
    fields = DECODER | {"vocab_size": 320, "head_dim": 16, "tie_word_embeddings": tied}
    model = save(folder, "Qwen3ForCausalLM", fields)
    write_tokenizer(folder, ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no"], INSTRUCTED)
    return model


def scores_of(model: Any, pairs: Sequence[Sequence[int]], yes: int, no: int | None) -> torch.Tensor:
    found = []
    for ids in pairs:
        with torch.inference_mode():
            logits = model(torch.tensor([list(ids)])).logits[0, -1]
        found.append(logits[yes] - (0 if no is None else logits[no]))
    return torch.stack(found)[:, None]


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_scores_pairs_by_the_logits_of_yes_and_no(tmp_path: Path, tied: bool) -> None:
    """Qwen3-Reranker's files are those of a chat model, so the model card decides."""
    model = causal_cross_encoder(tmp_path, tied=tied)
    assert isinstance(read_model_config(tmp_path), ModelConfig)
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\npipeline_tag: text-ranking\n---\n# Model\n")
    read = read_model_config(tmp_path)
    assert isinstance(read, EncoderConfig)
    assert read.pair_scoring is not None
    assert (read.is_cross_encoder, read.sigmoid, read.pooling) == (True, True, "last")
    tokenizer = Tokenizer.from_dir(tmp_path, chat_template=read.pair_scoring.template)
    yes, no = tokenizer.mark_id("yes"), tokenizer.mark_id("no")
    assert yes is not None
    texts = ("Paris.", "A long text, no?", "é")
    pairs = [tokenizer.encode_rendered_pair("", "capital?", text).ids for text in texts]
    assert tokenizer.decode(pairs[0], skip_special_tokens=False) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: capital?\n<Document>: Paris.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    ours = torch.from_numpy(runner(tmp_path).embed(pairs, [len(ids) for ids in pairs]))
    torch.testing.assert_close(ours, scores_of(model, pairs, yes, no).sigmoid(), atol=1e-5, rtol=1e-5)
    assert ours.std() > 1e-4


def test_a_decoder_with_the_module_logit_score_is_a_cross_encoder(tmp_path: Path) -> None:
    model = causal_cross_encoder(tmp_path, tied=True)
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.LogitScore", "path": "1_LogitScore"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    settings = tmp_path / "1_LogitScore/config.json"
    settings.write_text(json.dumps({"true_token_id": 7, "false_token_id": None}))
    names = {"activation_fn": "torch.nn.modules.linear.Identity", "prompts": {"q": "Rank."}, "default_prompt_name": "q"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(names))
    read = EncoderConfig.from_dir(tmp_path)
    assert read.pair_scoring is not None
    assert (read.pair_scoring.template, read.prompt, read.sigmoid) == ("", "Rank.", False)
    tokenizer = Tokenizer.from_dir(tmp_path)
    pair = tokenizer.encode_rendered_pair(read.prompt, "a", "bcd", max_document_tokens=2).ids
    assert tokenizer.decode(pair) == "<system>Rank.<query>a<document>bc<answer>"
    ours = torch.from_numpy(runner(tmp_path).embed([pair], [len(pair)]))
    torch.testing.assert_close(ours, scores_of(model, [pair], 7, None), atol=1e-5, rtol=1e-5)
    settings.write_text(json.dumps({"true_token_id": 7, "false_token_id": 2}))
    ours = torch.from_numpy(runner(tmp_path).embed([pair], [len(pair)]))
    torch.testing.assert_close(ours, scores_of(model, [pair], 7, 2), atol=1e-5, rtol=1e-5)
    settings.write_text(json.dumps({"true_token_id": 1000}))
    with pytest.raises(ModelError, match="not in the vocabulary"):
        runner(tmp_path)
    settings.write_text(json.dumps({"true_token_id": "yes"}))
    with pytest.raises(ModelError, match="must be token ids"):
        EncoderConfig.from_dir(tmp_path)


def test_token_types_change_the_scores_of_bert(tmp_path: Path) -> None:
    save(tmp_path, "BertForSequenceClassification", BERT | {"num_labels": 1})
    (ids,) = inputs((12,))
    first, second = runner(tmp_path).embed([ids, ids], [4, 8])
    assert abs(float(first[0] - second[0])) > 1e-6


def test_windows_and_rotary_bases_of_modernbert_change_the_vectors(tmp_path: Path) -> None:
    """All settings of the older form of config.json are used, and windows are computed in several parts."""
    model = save(tmp_path, "ModernBertModel", MODERN)
    long = inputs((64, 60))
    ours = runner(tmp_path).embed(long)
    old = {"layer_types": None, "rope_parameters": None, "global_attn_every_n_layers": 3, "local_attention": 8}
    change(tmp_path, **old, global_rope_theta=160_000.0, local_rope_theta=10_000.0)
    torch.testing.assert_close(runner(tmp_path).embed(long), ours)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "LOCAL_QUERIES", 9)
        torch.testing.assert_close(runner(tmp_path).embed(long), ours, atol=1e-6, rtol=1e-6)
    for setting in ({"local_attention": 6}, {"global_rope_theta": 10_000.0}, {"global_attn_every_n_layers": 2}):
        change(tmp_path, **old | {"global_rope_theta": 160_000.0} | setting)
        assert abs(runner(tmp_path).embed(long) - ours).max() > 1e-4
    assert model.config.layer_types == ["full_attention", *["sliding_attention"] * 2, "full_attention"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"id2label": {"0": "a", "1": "b"}}, "2 labels", id="labels"),
        pytest.param({"id2label": None}, "2 labels", id="default labels"),
        pytest.param({"sentence_transformers": {"activation_fn": "x.Tanh"}}, "Tanh", id="activation"),
        pytest.param({"hidden_activation": "relu"}, "hidden_activation", id="hidden activation"),
        pytest.param({"classifier_activation": "relu"}, "classifier_activation", id="classifier activation"),
        pytest.param({"classifier_pooling": "max"}, "classifier_pooling", id="classifier pooling"),
        pytest.param({"layer_types": ["full_attention"]}, "layer_types", id="layer types"),
        pytest.param({"local_attention": 1}, "local_attention", id="window"),
        pytest.param({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rotary", id="scaled rope"),
        pytest.param({"quantization_config": {}}, "quantized", id="quantized"),
    ],
)
def test_unsupported_cross_encoders_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    base = {"architectures": ["ModernBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}, **SMALL}
    config = {**base, "num_hidden_layers": 4, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert EncoderConfig.from_dir(tmp_path).windows == (0, 64, 64, 0)
    change(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        EncoderConfig.from_dir(tmp_path)


def test_the_engine_accepts_only_requests_of_its_models_type(tmp_path: Path) -> None:
    save(tmp_path / "scores", "BertForSequenceClassification", BERT | {"num_labels": 1})
    save(tmp_path / "vectors", "BertModel", BERT)
    pairs = Request("r", [5, 6, 7, 8], input_lengths=(3, 1), second_starts=(1, 1))
    texts = Request("r", [5, 6, 7, 8], input_lengths=(3, 1))
    scores = EmbeddingEngine(EngineConfig(model_dir=tmp_path / "scores"))
    vectors = EmbeddingEngine(EngineConfig(model_dir=tmp_path / "vectors"))
    for engine, wrong, right, message in (
        (scores, texts, pairs, "/v1/rerank"),
        (vectors, pairs, texts, "/v1/embeddings"),
    ):
        with pytest.raises(RequestRejected, match=message):
            engine.add_request(wrong)
        engine.add_request(right)
        (output,) = engine.step()
        assert (output.finish_reason, output.usage and output.usage.uncached) == ("stop", 4)
    scores.add_request(Request("s", [5, 6, 7, 8], input_lengths=(3, 1), second_starts=(1, 1), searches=2))
    (output,) = scores.step()
    assert output.usage == TokenCounts(uncached=4, searches=2)
    scores.add_request(Request("t", [5, 6], input_lengths=(2,), second_starts=(1,), searches=2))
    cancelled = scores.abort("t")
    assert cancelled is not None
    assert cancelled.usage == TokenCounts()  # nothing was searched
    with pytest.raises(RequestRejected, match="second text"):
        scores.add_request(Request("r", [5, 6, 7, 8], input_lengths=(3, 1), second_starts=(1,)))
