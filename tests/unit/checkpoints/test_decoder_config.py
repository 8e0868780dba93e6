"""Keys of config.json that files omit, write as null, or have at two levels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from inference_worker.checkpoints.decoder_config import read_decoder_directory
from inference_worker.checkpoints.encoder_config import EncoderConfig
from inference_worker.checkpoints.model_config import ModelConfig, ModelError

SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}  # fmt: skip


def write_config(directory: Path, architecture: str, **keys: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture], **SIZES, **keys}))
    return directory


def read_config(directory: Path, architecture: str, **keys: Any) -> ModelConfig:
    return read_decoder_directory(write_config(directory, architecture, **keys))


def test_windows_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    everywhere = (4096, 4096)
    assert read_config(tmp_path, "MistralForCausalLM").windows == everywhere
    assert read_config(tmp_path, "MistralForCausalLM", sliding_window=None).windows == ()
    assert read_config(tmp_path, "MistralForCausalLM", use_sliding_window=False).windows == everywhere
    assert read_config(tmp_path, "MixtralForCausalLM").windows == ()
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert read_config(tmp_path, name).windows == ()
        assert read_config(tmp_path, name, use_sliding_window=True, max_window_layers=1).windows == (0, 4096)
        assert read_config(tmp_path, name, use_sliding_window=None, max_window_layers=0).windows == ()
        assert read_config(tmp_path, name, use_sliding_window=False, sliding_window=9).windows == ()
    assert read_config(tmp_path, "Qwen2MoeForCausalLM").windows == ()
    with pytest.raises(ModelError, match="sliding_window is 4096, which is not supported"):
        read_config(tmp_path, "Qwen2MoeForCausalLM", use_sliding_window=True)


def test_layers_without_rotary_embedding(tmp_path: Path) -> None:
    def read(**keys: Any) -> ModelConfig:
        return read_config(tmp_path, "SmolLM3ForCausalLM", **{"num_hidden_layers": 4, **keys})

    assert read().unrotated == (False, False, False, True)
    assert read(no_rope_layer_interval=2).unrotated == (False, True, False, True)
    assert read(no_rope_layers=[1, 0, 0, 1, 1], no_rope_layer_interval=2).unrotated == (False, True, True, False)
    windowed = read(use_sliding_window=True, sliding_window=9)
    assert (windowed.windows, read(sliding_window=9).windows) == ((0, 0, 0, 9), ())
    for layers in ([1, 0, 0], [1, 0, 2, 1], "1010"):
        with pytest.raises(ModelError, match="no_rope_layers must have a 0 or 1 for each of 4 layers"):
            read(no_rope_layers=layers)
    with pytest.raises(ModelError, match="no_rope_layers"):
        read_config(tmp_path, "LlamaForCausalLM", no_rope_layers=[1, 0])


def test_the_bias_of_glm4_is_not_that_of_the_output(tmp_path: Path) -> None:
    for keys, expected in (({}, True), ({"attention_bias": False}, False)):
        read = read_config(tmp_path, "Glm4ForCausalLM", **keys)
        assert (read.qkv_bias, read.attention_bias, read.rope.rotary_dim) == (expected, False, 64)


def test_a_multimodal_file_replaces_keys_of_its_decoder(tmp_path: Path) -> None:
    def read(decoder: dict[str, Any], **keys: Any) -> ModelConfig:
        text = SIZES | {"dtype": "float16"} | decoder
        return read_config(tmp_path, "Gemma3ForConditionalGeneration", text_config=text, **keys)

    inner = read({"tie_word_embeddings": False, "eos_token_id": 1})
    assert (inner.tie_word_embeddings, inner.eos_token_ids, inner.dtype) == (False, (1,), "float16")
    outer = read({"tie_word_embeddings": True, "eos_token_id": 1}, tie_word_embeddings=False, eos_token_id=[1, 2])
    assert (outer.tie_word_embeddings, outer.eos_token_ids) == (False, (1, 2))
    quantized: dict[str, Any] = {"quantization_config": {}}
    for decoder, keys in ((quantized, {}), ({}, quantized)):
        with pytest.raises(ModelError, match="quant_method None is not supported"):
            read(decoder, **keys)


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        (
            "Phi3ForCausalLM",
            {
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings is 1; want at least 2",
        ),
        ("Qwen2ForCausalLM", {"layer_types": [{}, {}], "use_sliding_window": True}, "layer_types must have 2 entries"),
        ("LlamaForCausalLM", {"layer_types": [{}, {}]}, "layer_types is .* not supported"),
        (
            "Qwen2ForCausalLM",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 4.0}},
            "rope_theta is 1.0; want more than 1",
        ),
    ],
    ids=["longrope", "types", "types of a family without windows", "yarn"],
)
def test_values_that_cannot_be_computed_are_an_error(
    tmp_path: Path, architecture: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path, architecture, **keys)


def test_a_null_local_theta_is_the_global_one(tmp_path: Path) -> None:
    def thetas(**keys: Any) -> tuple[float, ...]:
        return EncoderConfig.from_dir(write_config(tmp_path, "ModernBertModel", **keys)).rope_thetas

    assert thetas(global_rope_theta=5e5) == (5e5, 1e4)
    assert thetas(global_rope_theta=5e5, local_rope_theta=None) == (5e5, 5e5)


_COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, ("awq", 4, 128, 16)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, ("gptq", 8, 0, 16)),
        (_COMPRESSED | {"config_groups": {"group_0": {"weights": _INT4}}}, ("compressed-tensors", 4, 128, 16)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8", 8, 0, 16)),
    ],
)
def test_the_format_of_a_quantized_checkpoint_is_read(
    config: dict[str, Any], expected: tuple[str, int, int, int], tmp_path: Path
) -> None:
    form = read_config(tmp_path, "LlamaForCausalLM", quantization_config=config).checkpoint_format
    assert form is not None
    assert (form.name, form.bits, form.group_size, form.activation_bits) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (7, "quantization_config is 7"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; want awq, gptq"),
        ({"quant_method": ["awq"]}, "is not supported"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits of AWQ is 3"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "marlin"}, "version of AWQ is 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "group_size": True}, "group_size is True"),
        ({"quant_method": "awq", "bits": [4], "group_size": 128}, "bits of AWQ"),
        ({"quant_method": "gptq", "bits": 2, "group_size": 128}, "bits of GPTQ is 2"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 10**9}, "group_size is 1000000000"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt of FP8"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "block of FP8 scales"),
        (_COMPRESSED | {"config_groups": {"a": {}, "b": {}}}, "exactly one group"),
        (_COMPRESSED | {"config_groups": {"a": {"weights": None}}}, "object of weights"),
        (_COMPRESSED | {"config_groups": {"a": {"weights": _INT4 | {"num_bits": 2}}}}, "num_bits of weights is 2"),
        (_COMPRESSED | {"format": "marlin-24", "config_groups": {"a": {"weights": _INT4}}}, "'marlin-24'"),
    ],
    ids=str,
)
def test_an_error_names_an_unsupported_format(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        read_config(tmp_path, "LlamaForCausalLM", quantization_config=config)
