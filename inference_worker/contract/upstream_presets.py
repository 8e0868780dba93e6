"""The presets of known upstreams: URL, authentication, parameters and differences from the protocol. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec

_BASIC = frozenset({"temperature", "top_p", "stop"})
_PENALTIES = frozenset({"presence_penalty", "frequency_penalty"})
_FORMATS = frozenset({"json_schema", "json_object"})
_TOOLS = frozenset({"tool_choice", "parallel_tool_calls"})
_OPENAI = _BASIC | _PENALTIES | _FORMATS | _TOOLS | {"seed", "n", "logit_bias", "reasoning_effort", "include_usage"}
# Parameters of servers that run models, in addition to OpenAI's.
_LOCAL = frozenset({"top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", "skip_special_tokens"})


@dataclass(frozen=True)
class UpstreamPreset:
    """What an upstream's API accepts and how its requests are authenticated."""

    title: str
    engine: UpstreamEngine = UpstreamEngine.OPENAI
    base_url: str = ""  # the default; empty: it must be given
    auth_header: str = "authorization"
    auth_prefix: str = "Bearer "
    headers: Mapping[str, str] = field(default_factory=dict)  # further headers of each request
    max_tokens: str = "max_tokens"  # the name of the field with the maximum output
    seed: str = "seed"  # the name of the seed's field
    repetition_penalty: str = "repetition_penalty"
    # The parameters that it applies, by their names in chat completions. "json_schema" and "json_object" are formats of
    # `response_format`; "include_usage" is an option of `stream_options`.
    parameters: frozenset[str] = _OPENAI
    cache_key: str = ""  # the field that separates the provider's prompt caches; empty: it has none
    image_tokens: int = 4096  # the maximum tokens of an image
    prompt_overhead: int = 64  # tokens that its template adds to a request, at most
    base_path: str = "/v1"  # beginning of the paths of a managed server's API
    health_path: str = "/v1/models"  # responds with 200 when a managed server accepts requests


_OPENAI_PRESET = UpstreamPreset(
    "OpenAI",
    base_url="https://api.openai.com/v1",
    max_tokens="max_completion_tokens",
    cache_key="prompt_cache_key",
    image_tokens=2_650,
)
PRESETS: Mapping[str, UpstreamPreset] = {
    "openai": _OPENAI_PRESET,
    "azure": replace(_OPENAI_PRESET, title="Azure OpenAI (v1 API)", base_url="", auth_header="api-key", auth_prefix=""),
    "anthropic": UpstreamPreset(
        "Anthropic",
        engine=UpstreamEngine.ANTHROPIC,
        base_url="https://api.anthropic.com/v1",
        auth_header="x-api-key",
        auth_prefix="",
        headers={"anthropic-version": "2023-06-01"},
        parameters=_BASIC | _TOOLS | {"top_k", "json_schema", "reasoning_effort", "cache_control"},
        image_tokens=4_784,
        prompt_overhead=1_024,  # its system prompt for tools
    ),
    "google": UpstreamPreset(
        "Google Gemini (OpenAI compatibility)",
        base_url="https://generativelanguage.googleapis.com/v1beta/openai",
        parameters=_OPENAI - {"logit_bias", "seed"} - _PENALTIES,
        image_tokens=4_128,
    ),
    "mistral": UpstreamPreset(
        "Mistral",
        base_url="https://api.mistral.ai/v1",
        seed="random_seed",
        parameters=_OPENAI - {"logit_bias", "reasoning_effort", "include_usage"},
        image_tokens=4_096,
    ),
    "groq": UpstreamPreset(
        "Groq",
        base_url="https://api.groq.com/openai/v1",
        max_tokens="max_completion_tokens",
        parameters=_OPENAI - {"logit_bias", "n"} - _PENALTIES,
    ),
    "together": UpstreamPreset(
        "Together",
        base_url="https://api.together.xyz/v1",
        parameters=_OPENAI | {"top_k", "min_p", "repetition_penalty"},
    ),
    "openrouter": UpstreamPreset(
        "OpenRouter",
        base_url="https://openrouter.ai/api/v1",
        parameters=_OPENAI - {"n"} | {"top_k", "min_p", "repetition_penalty"},
    ),
    "vllm": UpstreamPreset(
        "vLLM",
        parameters=_OPENAI | _LOCAL | {"min_tokens", "regex", "grammar", "priority"},
        cache_key="cache_salt",
        image_tokens=16_384,
        health_path="/health",
    ),
    "sglang": UpstreamPreset("SGLang", parameters=_OPENAI | _LOCAL, image_tokens=16_384, health_path="/health"),
    "tgi": UpstreamPreset(
        "Text Generation Inference", parameters=_OPENAI - {"n", "parallel_tool_calls"}, health_path="/health"
    ),
    "llamacpp": UpstreamPreset(
        "llama.cpp server",
        parameters=(_OPENAI | {"top_k", "min_p", "repetition_penalty", "ignore_eos"}) - {"reasoning_effort"},
        repetition_penalty="repeat_penalty",
        health_path="/health",
    ),
    "openvino": UpstreamPreset(
        "OpenVINO Model Server",
        parameters=(_OPENAI | {"top_k", "repetition_penalty", "ignore_eos"}) - {"n", "logit_bias", "reasoning_effort"},
        base_path="/v3",
        health_path="/v2/health/ready",
    ),
    "ollama": UpstreamPreset(
        "Ollama",
        base_url="http://localhost:11434/v1",
        parameters=_OPENAI - {"n", "logit_bias"} - _TOOLS,
        health_path="/api/version",
    ),
    "litellm": UpstreamPreset("LiteLLM proxy", parameters=_OPENAI | {"top_k"}),
    "millrace": UpstreamPreset(
        "Millrace",
        parameters=_OPENAI | _LOCAL | {"min_tokens", "regex", "grammar"},
        cache_key="prompt_cache_key",
    ),
}
# Without a preset, only what every server of the protocol accepts.
_GENERIC = {
    UpstreamEngine.OPENAI: UpstreamPreset("OpenAI-compatible server"),
    UpstreamEngine.ANTHROPIC: replace(PRESETS["anthropic"], title="Anthropic-compatible server", base_url=""),
}


def preset_of(spec: UpstreamSpec) -> UpstreamPreset:
    """Return the preset of an upstream; the protocol's if it names none.

    Raises:
        ValueError: there is no such preset, or it has another protocol.
    """
    if not spec.preset:
        return _GENERIC[spec.protocol]
    preset = PRESETS.get(spec.preset)
    if preset is None or preset.engine != spec.protocol:
        names = ", ".join(sorted(name for name, each in PRESETS.items() if each.engine == spec.protocol))
        raise ValueError(f"preset: {spec.preset!r} is no preset of the engine {spec.engine}. Use one of: {names}")
    return preset
