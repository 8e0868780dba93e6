"""A worker's settings and the engine configuration made from them."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from inference_worker.checkpoints.model_config import ModelError
from inference_worker.contract import env
from inference_worker.contract.engine_config import CPU_PROFILES, PROFILES, EngineConfig, EngineProfile, ProfileName
from inference_worker.contract.output_formats import REASONING_FORMATS, TOOL_FORMATS
from inference_worker.contract.settings import ModelSpec, WorkerSettings, format_models, parse_models
from inference_worker.contract.worker_names import read_worker_id
from inference_worker.worker.engine_options import find_draft_model, step_limits
from inference_worker.worker.worker import on_demand_specs, worker_name


def settings(**values: object) -> WorkerSettings:
    named = {f"MILLRACE_{name.upper()}": str(value) for name, value in values.items()}
    required = {"MILLRACE_VALKEY_URL": "redis://127.0.0.1", "MILLRACE_WORKER_SECRET": "w" * 32}
    return env.load(WorkerSettings, required | named)


def test_a_worker_does_not_start_without_its_secret() -> None:
    with pytest.raises(env.SettingsError, match="MILLRACE_WORKER_SECRET: is required"):
        env.load(WorkerSettings, {"MILLRACE_VALKEY_URL": "redis://127.0.0.1"})


def test_the_default_profile_is_balanced() -> None:
    assert step_limits(settings(), "cuda") == PROFILES["balanced"]
    assert step_limits(settings(engine_profile="latency"), "cuda") == PROFILES["latency"]


def test_fewer_prompts_start_in_a_balanced_step_on_the_cpu() -> None:
    assert step_limits(settings(), "cpu") == CPU_PROFILES["balanced"]
    assert CPU_PROFILES["balanced"].max_starting_tokens == 256
    assert step_limits(settings(engine_profile="throughput"), "cpu") == PROFILES["throughput"]


def test_every_profile_can_be_set_and_configures_an_engine() -> None:
    assert tuple(PROFILES) == get_args(ProfileName)
    for name, profile in PROFILES.items():
        assert step_limits(settings(engine_profile=name), "cuda") == profile
        EngineConfig(
            Path(),
            max_num_seqs=profile.max_num_seqs,
            max_num_batched_tokens=profile.max_num_batched_tokens,
            long_prefill_token_threshold=profile.long_prefill_token_threshold,
        )
    with pytest.raises(env.SettingsError, match="MILLRACE_ENGINE_PROFILE"):
        settings(engine_profile="fast")


def test_profiles_are_ordered_by_step_length() -> None:
    ordered = [PROFILES[name] for name in ("latency", "balanced", "throughput")]
    assert [p.max_num_batched_tokens for p in ordered] == sorted({p.max_num_batched_tokens for p in ordered})
    assert [p.max_num_seqs for p in ordered] == sorted({p.max_num_seqs for p in ordered})


def test_one_set_limit_keeps_the_profiles_other_limits() -> None:
    latency = PROFILES["latency"]
    found = step_limits(settings(engine_profile="latency", long_prefill_token_threshold=17), "cuda")
    assert found == EngineProfile(latency.max_num_batched_tokens, 17, latency.max_num_seqs)


def test_the_batch_size_and_the_step_size_adjust_each_other() -> None:
    assert step_limits(settings(max_num_seqs=4000), "cuda").max_num_batched_tokens == 4000
    assert step_limits(settings(max_num_batched_tokens=8), "cuda").max_num_seqs == 8
    assert (
        step_limits(settings(max_num_seqs=2), "cuda").max_num_batched_tokens
        == PROFILES["balanced"].max_num_batched_tokens
    )
    both = step_limits(settings(max_num_seqs=10, max_num_batched_tokens=20, long_prefill_token_threshold=5), "cuda")
    assert both == EngineProfile(max_num_batched_tokens=20, long_prefill_token_threshold=5, max_num_seqs=10)
    with pytest.raises(
        SystemExit, match=r"MILLRACE_MAX_NUM_BATCHED_TOKENS \(8\) must be at least MILLRACE_MAX_NUM_SEQS \(10\)"
    ):
        step_limits(settings(max_num_seqs=10, max_num_batched_tokens=8), "cuda")


def test_a_models_context_can_be_lowered() -> None:
    assert parse_models("a=embedded,b=/models/b?dtype=bfloat16&max_model_len=4096") == (
        ModelSpec("a", "embedded", "auto", None),
        ModelSpec("b", "/models/b", "bfloat16", 4096),
    )
    with pytest.raises(ValueError, match="from 16"):
        parse_models("a=embedded?max_model_len=0")
    with pytest.raises(ValueError, match="max_model_len"):
        parse_models("a=embedded?length=3")


def test_a_model_has_a_quantization() -> None:
    plain, quantized, kept = parse_models(
        "a=embedded,b=embedded?quantization=int4-g64,c=/m/c.gguf?quantization=gguf&kv_cache_dtype=int8"
    )
    assert (plain.quantization, quantized.quantization, kept.quantization) == ("none", "int4-g64", "gguf")
    assert (plain.kv_cache_dtype, kept.kv_cache_dtype) == ("auto", "int8")
    assert format_models([kept]) == "c=/m/c.gguf?quantization=gguf&kv_cache_dtype=int8"
    assert len({each.version for each in (plain, quantized, kept)}) == 3
    with pytest.raises(ValueError, match="want one of auto, int8, fp8"):
        parse_models("a=embedded?kv_cache_dtype=int5")
    with pytest.raises(ValueError, match="want one of none, int8, int4, int4-g64, int4-g128, fp8"):
        parse_models("a=embedded?quantization=int3")


def test_a_model_has_a_draft_model(tmp_path: Path) -> None:
    text = "a=/models/a?draft_model=self%3Aint8,b=/models/b?draft_model=%2Fmodels%2Fb-small,c=/models/c"
    quantized, other, none = specs = parse_models(text)
    assert format_models(specs) == text
    assert len({spec.version for spec in specs}) == 3
    assert find_draft_model(quantized, tmp_path, tmp_path) == (tmp_path, "int8")
    assert find_draft_model(none, tmp_path, tmp_path) == (None, "none")
    with pytest.raises(ModelError, match="/models/b-small is neither a model directory"):
        find_draft_model(other, tmp_path, tmp_path)
    with pytest.raises(ValueError, match="draft_model: 'self:int3': the model's own quantized forms are self:int8, "):
        parse_models("a=embedded?draft_model=self%3Aint3")
    with pytest.raises(ValueError, match="does not generate text"):
        parse_models("a=embedded?draft_model=embedded:minilm")


def test_the_parsers_of_a_model() -> None:
    (spec,) = parse_models("a=embedded?tool_parser=mistral&reasoning_parser=none")
    assert (spec.tool_parser, spec.reasoning_parser) == ("mistral", "none")
    for option, names in (("tool_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
        with pytest.raises(ValueError, match=f"{option}: want one of auto, none, {', '.join(names)}$"):
            parse_models(f"a=embedded?{option}=other")


def test_the_control_tokens_of_a_model() -> None:
    default, (spec,) = parse_models("a=embedded")[0], parse_models("a=embedded?control_tokens=anywhere")
    assert (default.control_tokens, spec.control_tokens) == ("template", "anywhere")
    assert parse_models(format_models([spec])) == (spec,)
    with pytest.raises(ValueError, match="want one of template, anywhere"):
        parse_models("a=embedded?control_tokens=nowhere")


def test_the_memory_of_the_kv_cache_is_a_size_or_a_share() -> None:
    assert settings().kv_cache_memory is None
    assert settings(kv_cache_memory="2GiB").kv_cache_memory == 2 << 30
    assert settings(kv_cache_memory="0.25").kv_cache_memory == 0.25
    for wrong in ("1.0", "0.0", "1.5GiB", "nan.", "half"):
        with pytest.raises(env.SettingsError, match=r"MILLRACE_KV_CACHE_MEMORY: .* want a size such as"):
            settings(kv_cache_memory=wrong)


def test_a_worker_without_a_model_needs_a_name(tmp_path: Path) -> None:
    assert worker_name(settings(data_dir=tmp_path)) == f"smollm2-135m-{read_worker_id(tmp_path)}"
    assert worker_name(settings(worker_model="none", worker_name="gpu-1")) == "gpu-1"
    with pytest.raises(SystemExit, match="MILLRACE_WORKER_NAME: set a stable name"):
        worker_name(settings(worker_model="none"))


def test_the_models_on_demand_are_other_models_of_the_settings() -> None:
    models = "a=embedded,b=embedded?quantization=int8,c=embedded:minilm"
    assert on_demand_specs(settings(models=models)) == []
    found = on_demand_specs(settings(models=models, worker_on_demand_models="c,b"))
    assert [spec.name for spec in found] == ["c", "b"]
    for wrong in ("a", "d"):
        with pytest.raises(SystemExit, match=rf"MILLRACE_WORKER_ON_DEMAND_MODELS: '{wrong}' .*\(b, c\)"):
            on_demand_specs(settings(models=models, worker_on_demand_models=wrong))
