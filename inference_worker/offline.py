"""The engine without services: one generation, or a measurement of its speed. `millrace generate` and `bench` run it.

python -m inference_worker.offline generate '{"source": "/models/mine", "prompt": "Hello", "max_tokens": 16}'
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_worker.checkpoints.encoder_config import EncoderConfig, read_model_config
from inference_worker.checkpoints.model_config import ModelConfig, ModelError
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.checkpoints.tokenizer_convert import find_source
from inference_worker.contract import env
from inference_worker.contract.engine_config import (
    DeviceName,
    DTypeName,
    EngineConfig,
    KVCacheDTypeName,
    QuantizationName,
)
from inference_worker.contract.request import Request, RequestRejected, SamplingParams
from inference_worker.contract.settings import ModelSpec, WorkerSettings
from inference_worker.engine.compute_path import place_engine
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.model_runner import ModelRunner

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class OfflineOptions:
    """The options of both commands. `source` is a model directory, a .gguf file, or `embedded`."""

    source: str
    prompt: str | None = None
    prompt_ids: tuple[int, ...] = ()
    prompt_tokens: int = 128  # prompt tokens of each stream of a measurement
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    dtype: DTypeName = "auto"
    quantization: QuantizationName = "none"
    kv_dtype: KVCacheDTypeName = "auto"
    device: DeviceName = "auto"
    streams: tuple[int, ...] = (1, 8, 32)
    as_json: bool = False


@dataclass(frozen=True)
class OfflineModel:
    """A model directory. It may have no tokenizer if no text is read."""

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer | None

    @classmethod
    def find(cls, options: OfflineOptions) -> OfflineModel:
        """Return the model. A .gguf file is converted first, into the user's cache directory.

        Raises:
            ModelError: the model is missing, damaged, not supported, or does not generate text.
        """
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millrace"
        directory = Path(options.source).expanduser()
        has_tokenizer = (directory / "tokenizer.json").exists() or not directory.is_dir() or find_source(directory)
        without_text = options.prompt is None and not has_tokenizer
        if not without_text:
            directory = ensure_model(
                ModelSpec("model", options.source, options.dtype, quantization=options.quantization), cache
            )
        config = read_model_config(directory)
        if isinstance(config, EncoderConfig):
            raise ModelError(f"{directory} is an encoder: it does not generate text")
        return cls(directory, config, None if without_text else Tokenizer.from_dir(directory))

    def load(self, options: OfflineOptions, max_num_seqs: int, max_tokens: int) -> LLMEngine:
        """Return an engine for sequences of at most `max_tokens` tokens, prompt and output.

        It uses the CPU as a worker does with the same settings.
        """
        limit = min(max_tokens, self.config.max_model_len)
        kernels, node, threads = (
            env.read_one(os.environ, WorkerSettings, name) for name in ("cpu_kernels", "cpu_node", "cpu_threads")
        )
        placement = place_engine(options.device, node, threads)
        os.sched_setaffinity(0, placement.cpus)
        config = EngineConfig(
            model_dir=self.directory,
            device=options.device,
            dtype=options.dtype,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=limit,
            threads=placement.threads,
            cpu_kernels=kernels,
            prefix_cache=False,
            measure_peaks=False,
        )
        runner = None if self.tokenizer else ModelRunner(config, self.config, limit)
        return LLMEngine(config, runner=runner, model_config=self.config, tokenizer=self.tokenizer)


def generate(options: OfflineOptions) -> dict[str, Any]:
    """Generate one output. Its text is printed while it is generated, unless the options ask for JSON.

    Raises:
        RequestRejected: the prompt is too long, or the model cannot serve the request.
    """
    model = OfflineModel.find(options)
    prompt = list(options.prompt_ids)
    if model.tokenizer is not None and not prompt:
        prompt = model.tokenizer.encode(options.prompt or "")
    engine = model.load(options, 1, len(prompt) + options.max_tokens)
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        logprobs=0 if options.as_json else None,
    )
    started = time.perf_counter()
    engine.add_request(Request("generate", prompt, params))
    tokens: list[int] = []
    logprobs: list[float] = []
    text: list[str] = []
    reason, first_at = None, 0.0
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                raise RequestRejected(output.error.code, output.error.message)
            first_at = first_at or time.perf_counter()
            tokens += output.token_ids
            logprobs += [token.logprob for token in output.logprobs]
            text.append(output.text)
            reason = output.finish_reason or reason
            if not options.as_json:
                print(output.text, end="", flush=True)  # noqa: T201  (a command line)
    return {
        "prompt_ids": prompt,
        "token_ids": tokens,
        "logprobs": logprobs,
        "text": "".join(text),
        "finish_reason": reason,
        "first_token_seconds": round(first_at - started, 4),
        "seconds": round(time.perf_counter() - started, 4),
    }


def measure(options: OfflineOptions) -> list[dict[str, Any]]:
    """Measure the speed with several numbers of concurrent streams. All streams have the same lengths."""
    model = OfflineModel.find(options)
    engine = model.load(options, max(options.streams), options.prompt_tokens + max(options.max_tokens, WARM_UP_TOKENS))
    _measure_streams(engine, options, 1, WARM_UP_TOKENS)
    return [_measure_streams(engine, options, streams, options.max_tokens) for streams in options.streams]


def _measure_streams(engine: LLMEngine, options: OfflineOptions, streams: int, max_tokens: int) -> dict[str, Any]:
    words = random.Random(options.seed)  # noqa: S311  (content does not matter)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    for stream in range(streams):
        prompt = [words.randrange(engine.model_config.vocab_size) for _ in range(options.prompt_tokens)]
        engine.add_request(Request(f"{streams}.{stream}", prompt, params))
    tokens = 0
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                raise RequestRejected(output.error.code, output.error.message)
            tokens += len(output.token_ids)
    seconds = time.perf_counter() - started
    rate = round(tokens / seconds, 1)
    return {"streams": streams, "output_tokens": tokens, "seconds": round(seconds, 3), "tokens_per_second": rate}


def main() -> int:
    command, given = sys.argv[1:]
    fields: dict[str, Any] = json.loads(given)
    for name in ("prompt_ids", "streams"):
        if name in fields:
            fields[name] = tuple(fields[name])
    options = OfflineOptions(**fields)
    try:
        result: Any = generate(options) if command == "generate" else measure(options)
    except (ModelError, RequestRejected, ValueError) as exc:
        print(f"millrace {command}: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    if options.as_json:
        print(json.dumps(result))  # noqa: T201
    elif command == "generate":
        print(f"\n[{len(result['token_ids'])} tokens, {result['seconds']:.2f} s]", file=sys.stderr)  # noqa: T201
    else:
        print("streams  tokens/s")  # noqa: T201
        for row in result:
            print(f"{row['streams']:>7}  {row['tokens_per_second']:>8,.1f}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
