"""`millrace generate` and `bench`: the engine without services. The process becomes one of the worker's package."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any, NoReturn

import click

from millrace.cli.app import ApiCommand, fail
from millrace.local import INSTALL_SERVER

_PACKAGES = ("torch", "safetensors", "tokenizers", "gguf", "msgspec")
_DTYPES = click.Choice(["auto", "float32", "bfloat16", "float16"])
_QUANTIZATIONS = click.Choice(["none", "int8", "int4", "int4-g64", "int4-g128", "fp8", "gguf"])
_KV_DTYPES = click.Choice(["auto", "int8", "fp8"])
_DEVICES = click.Choice(["auto", "cpu", "cuda"])


class _Generate(ApiCommand):
    example = 'millrace generate /models/mine --prompt "The sky is" --max-tokens 16 --dtype float32 --json'


class _Bench(ApiCommand):
    example = "millrace bench /models/mine --streams 1,8,32"


@click.command(cls=_Generate)
@click.argument("source", metavar="DIR")
@click.option("--prompt", metavar="TEXT", help="Prompt as text.")
@click.option("--prompt-ids", metavar="IDS", help="Prompt as token IDs, comma-separated.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampling.")
@click.option("--dtype", type=_DTYPES, default="auto", show_default=True, help="Number format of the weights.")
@click.option(
    "--quantization", type=_QUANTIZATIONS, default="none", show_default=True, help="Quantize the weights when loading."
)
@click.option("--kv-dtype", type=_KV_DTYPES, default="auto", show_default=True, help="Of the KV cache.")
@click.option("--device", type=_DEVICES, default="auto", show_default=True, help="Where to compute.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with token IDs, logprobs and times.")
def generate(prompt: str | None, prompt_ids: str | None, **options: Any) -> None:
    """Generate once with a model, without services.

    DIR is a Hugging Face directory, a .gguf file, or `embedded` for the model that comes with Millrace.
    """
    if (prompt is None) == (prompt_ids is None):
        raise click.UsageError("Give either --prompt or --prompt-ids.")
    options |= {"prompt": prompt} if prompt is not None else {"prompt_ids": _numbers("--prompt-ids", prompt_ids, 0)}
    _become("generate", options)


@click.command(cls=_Bench)
@click.argument("source", metavar="DIR")
@click.option("--streams", default="1,8,32", show_default=True, metavar="LIST", help="Numbers of concurrent streams.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="Of each stream.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Output of each stream.")
@click.option("--dtype", type=_DTYPES, default="auto", show_default=True, help="Number format of the weights.")
@click.option(
    "--quantization", type=_QUANTIZATIONS, default="none", show_default=True, help="Quantize the weights when loading."
)
@click.option("--kv-dtype", type=_KV_DTYPES, default="auto", show_default=True, help="Of the KV cache.")
@click.option("--device", type=_DEVICES, default="auto", show_default=True, help="Where to compute.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(streams: str, **options: Any) -> None:
    """Measure the output tokens per second of a model with concurrent streams, without services."""
    _become("bench", options | {"streams": _numbers("--streams", streams, 1)})


def _numbers(option: str, text: str | None, minimum: int) -> list[int]:
    try:
        values = [int(part) for part in (text or "").replace(",", " ").split()]
    except ValueError:
        values = []
    if not values or min(values) < minimum:
        raise click.UsageError(f"{option} {text!r} is not a list of numbers: give them like 1,8,32.")
    return values


def _become(command: str, options: dict[str, Any]) -> NoReturn:
    """Replace this process by one of the worker's package: only that package may load torch."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        fail(f"not installed: {', '.join(missing)}; {INSTALL_SERVER}")
    sys.stdout.flush()
    arguments = [sys.executable, "-m", "inference_worker.offline", command, json.dumps(options)]
    os.execv(sys.executable, arguments)  # noqa: S606  (no shell)
