"""The report of `millrace models inspect`: the checkpoint, and its fit to this machine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from inference_worker.checkpoints.downloads.hub import Hub
from inference_worker.checkpoints.downloads.hub_source import HubSource
from inference_worker.checkpoints.inspection import CheckpointReport, inspect_checkpoint
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.model_store import ModelStore
from inference_worker.contract import env
from inference_worker.contract.engine_config import KVCacheDTypeName, QuantizationName
from inference_worker.engine.capacity.fit import ComputeDevice, estimate_fit
from inference_worker.engine.capacity.roofline import Peaks
from millrace.cli import output
from millrace.cli.output import Column, number, size, yes_no

MEASURE_SECONDS = 300.0


def _rate(value: float) -> str:
    return f"{value:,.0f} tokens/s"


_REPORT = [
    Column("source", "path"),
    Column("can be served", "can_serve", yes_no),
    Column("architecture", "architecture"),
    Column("task", "task"),
    Column("stored as", "dtype"),
    Column("quantization", "quantization"),
    Column("files of weights", "num_files", number),
    Column("stored weights", "stored_bytes", size),
    Column("maximum context", "max_model_len", number),
    Column("tokenizer", "tokenizer"),
    Column("vocabulary", "vocab_size", number),
    Column("chat template", "chat_template", yes_no),
    Column("tool parser", "tool_parser"),
    Column("reasoning parser", "reasoning_parser"),
    Column("sampling defaults", "sampling_defaults"),
    Column("adaptations", "template_adaptations", lambda names: "; ".join(names) or "none"),
    Column("license", "license"),
]
_FIT = [
    Column("machine", "machine"),
    Column("free memory", "free_bytes", size),
    Column("computes in", "dtype"),
    Column("memory of weights", "weight_bytes", size),
    Column("KV cache per token", "kv_token_bytes", lambda value: f"{value:,} bytes"),
    Column("KV cache", "kv_bytes", size),
    Column("tokens in KV cache", "kv_tokens", number),
    Column("context", "context", number),
    Column("streams of that context", "streams", number),
    Column("one stream, at most", "decode_tokens_per_second", _rate),
    Column("all streams, at most", "batch_tokens_per_second", _rate),
    Column("prompt, at most", "prompt_tokens_per_second", _rate),
]


def inspect_source(
    source: Path | HubSource,
    store: ModelStore,
    *,
    context: int | None,
    dtype: str,
    device: str,
    kv_memory: str | None,
    quantization: QuantizationName = "none",
    kv_dtype: KVCacheDTypeName = "auto",
) -> dict[str, Any]:
    """Return the report as JSON values. Of a model on the hub that was not pulled, only headers are downloaded.

    Raises:
        ModelError: the model is not found, or an option is invalid.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = _inspect(source, store, Path(scratch))
    machine = fit = None
    if report.is_supported and importlib.util.find_spec("torch") is not None:
        try:
            memory = env.size_or_share(kv_memory) if kv_memory else None
            machine = _measure(dtype, device, report)
            fit = estimate_fit(
                report, machine, context=context, kv_memory=memory, quantization=quantization, kv_dtype=kv_dtype
            )
        except ValueError as exc:
            raise ModelError(str(exc)) from None
    return {
        "source": str(source),
        "can_serve": report.is_supported and (fit is None or fit.problem is None),
        "checkpoint": report.as_json(),
        "machine": asdict(machine) if machine else None,
        "fit": fit.as_json() if fit else None,
    }


def print_report(result: dict[str, Any]) -> None:
    """Print the report as tables."""
    checkpoint, machine, fit = result["checkpoint"], result["machine"], result["fit"]
    output.print_fields({**checkpoint, "path": result["source"], "can_serve": result["can_serve"]}, _REPORT)
    if fit:
        values = {**fit, "machine": machine["name"], "free_bytes": machine["free_bytes"]}
        output.print_fields(values, [column for column in _FIT if values.get(str(column.value)) is not None])
    for problem in checkpoint["problems"]:
        click.echo(output.printable(f"{problem['code']}: {problem['message']}"), err=True)
    if fit and fit["problem"]:
        click.echo(output.printable(fit["problem"]), err=True)


def _inspect(source: Path | HubSource, store: ModelStore, scratch: Path) -> CheckpointReport:
    if isinstance(source, Path):
        return inspect_checkpoint(source)
    if pulled := store.find(source.repository, source.revision, source.file):
        return inspect_checkpoint(pulled.source)
    path, license_name = Hub().fetch_headers(source, scratch)
    report = inspect_checkpoint(path)
    problems = tuple(
        replace(problem, message=problem.message.replace(str(path), source.repository)) for problem in report.problems
    )
    return replace(report, path=Path(str(source)), problems=problems, license=license_name or report.license)


def _measure(dtype: str, device: str, report: CheckpointReport) -> ComputeDevice:
    """Return the machine, measured in another process: only the worker's package may load torch.

    Raises:
        ModelError: the device is not available.
    """
    checkpoint_dtype = report.config.dtype if report.config else "bfloat16"
    options = json.dumps({"dtype": dtype, "device": device, "checkpoint_dtype": checkpoint_dtype})
    command = [sys.executable, "-m", "inference_worker.machine", options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_SECONDS, check=False)  # noqa: S603
    if done.returncode:
        raise ModelError((done.stderr.strip().splitlines() or ["the machine cannot be measured"])[-1])
    values = json.loads(done.stdout)
    return ComputeDevice(**{**values, "peaks": Peaks(**values["peaks"])})
