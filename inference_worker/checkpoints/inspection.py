"""Inspection of a checkpoint before it is loaded: whether the engine supports it, and what it contains.

Only headers, configurations and the tokenizer are read, never the weights. Does not import torch.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal

from inference_worker.checkpoints.checkpoint import read_tensor_entries, weight_files
from inference_worker.checkpoints.checkpoint_format import read_checkpoint_format
from inference_worker.checkpoints.encoder_config import (
    EncoderConfig,
    ModelTask,
    read_model_config,
    supported_architectures,
)
from inference_worker.checkpoints.gguf_blocks import KEPT_BLOCKS
from inference_worker.checkpoints.gguf_header import GGUFError
from inference_worker.checkpoints.model_config import ConfigReader, ModelConfig, ModelError, read_json
from inference_worker.checkpoints.model_source import link_with_tokenizer
from inference_worker.checkpoints.safetensors_header import StoredTensor
from inference_worker.checkpoints.sampling_files import read_sampling_defaults
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.checkpoints.tokenizer_convert import find_source
from inference_worker.contract.sampling_defaults import format_sampling_defaults

Format = Literal["safetensors", "gguf"]
ProblemCode = Literal[
    "missing_file",
    "damaged_file",
    "pickled_weights",
    "unsupported_architecture",
    "unsupported_config",
    "unsupported_quantization",
    "unsupported_dtype",
    "unsupported_tokenizer",
]

MANIFEST = "manifest.json"  # file of a pulled model that lists the others
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_FLOAT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_CARD_BYTES = 1 << 16  # bytes of README.md that are searched for the license
_LICENSE_LINE = re.compile(r"^license:[ \t]*([\w.-]{1,64})[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CheckpointProblem:
    """A reason why a checkpoint cannot be served. The message names the file and what to do, if anything helps."""

    code: ProblemCode
    message: str


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The contents of a checkpoint, and the problems that prevent the engine from serving it."""

    path: Path
    format: Format
    problems: tuple[CheckpointProblem, ...] = ()
    architecture: str | None = None
    config: ModelConfig | EncoderConfig | None = None  # None if it is not supported
    quantization: str | None = None  # the method in config.json, or the most frequent type of a GGUF file's tensors
    num_files: int = 0
    stored_bytes: int = 0  # bytes of all tensors in the files
    float_values: int = 0  # numbers that are converted to the dtype of the computation
    packed_bytes: int = 0  # bytes of tensors in other types, which stay as they are
    kept_values: int = 0  # numbers of a GGUF file in blocks that quantization gguf keeps
    kept_bytes: int = 0  # bytes of these numbers after they are loaded
    dtypes: dict[str, int] = field(default_factory=dict)  # bytes of the tensors of each type
    tokenizer: str | None = None
    vocab_size: int | None = None
    has_chat_template: bool = False
    tool_parser: str | None = None  # value of a deployment's option of this name
    reasoning_parser: str | None = None
    sampling_defaults: str = ""  # value of a deployment's option of this name
    template_adaptations: tuple[str, ...] = ()  # changes of messages for the chat template
    license: str | None = None

    @property
    def is_supported(self) -> bool:
        """Return whether the engine can load the checkpoint, memory permitting."""
        return not self.problems

    @property
    def task(self) -> ModelTask | None:
        """Return what the model is for."""
        if isinstance(self.config, EncoderConfig):
            return "rerank" if self.config.is_cross_encoder else "embed"
        return None if self.config is None else "generate"

    @property
    def dtype(self) -> str | None:
        """Return the type of most of the weights."""
        return max(self.dtypes, key=self.dtypes.__getitem__, default=None)

    def weight_bytes(self, value_bytes: int) -> int:
        """Return the memory of the weights if a number of the computation's dtype takes `value_bytes`."""
        return self.float_values * value_bytes + self.packed_bytes

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "path": str(self.path),
            "format": self.format,
            "supported": self.is_supported,
            "problems": [{"code": problem.code, "message": problem.message} for problem in self.problems],
            "architecture": self.architecture,
            "task": self.task,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "num_files": self.num_files,
            "stored_bytes": self.stored_bytes,
            "max_model_len": None if self.config is None else self.config.max_model_len,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "chat_template": self.has_chat_template,
            "tool_parser": self.tool_parser if self.task == "generate" else None,
            "reasoning_parser": self.reasoning_parser if self.task == "generate" else None,
            "sampling_defaults": self.sampling_defaults if self.task == "generate" else None,
            "template_adaptations": list(self.template_adaptations) if self.has_chat_template else None,
            "license": self.license,
        }


def inspect_checkpoint(path: str | Path) -> CheckpointReport:
    """Return the report of a Hugging Face directory or a .gguf file. Problems are part of the report.

    Raises:
        ModelError: `path` is neither of them.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _inspect_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return _inspect_gguf(path)
    raise ModelError(f"{path}: neither a model directory nor a .gguf file")


def _inspect_directory(directory: Path) -> CheckpointReport:
    problems: list[CheckpointProblem] = []
    fields: dict[str, Any] = {"license": _license(directory)}
    with _collect_errors(problems, "damaged_file" if (directory / "config.json").exists() else "missing_file"):
        raw = read_json(directory / "config.json")
        fields |= _read_config(directory, raw, problems)
    fields |= _read_weights(directory, problems)
    main = max(fields["dtypes"], key=fields["dtypes"].__getitem__, default=None)
    if main and main not in _FLOAT_DTYPES.values() and not fields.get("quantization"):
        text = f"the weights are of {main}; want {', '.join(_FLOAT_DTYPES.values())} or a supported quantization"
        problems.append(CheckpointProblem("unsupported_dtype", text))
    fields |= _read_tokenizer(directory, problems)
    return CheckpointReport(path=directory, format="safetensors", problems=tuple(problems), **fields)


def _read_config(directory: Path, raw: dict[str, Any], problems: list[CheckpointProblem]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    names = raw.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        fields["architecture"] = names[0]
        if names[0] not in supported_architectures():
            known = ", ".join(sorted(supported_architectures()))
            text = f"architecture {names[0]!r} is not supported; want one of {known}"
            problems.append(CheckpointProblem("unsupported_architecture", text))
            return fields
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        fields["quantization"] = method if isinstance(method, str) else "unknown"
    count = len(problems)
    with _collect_errors(problems, "unsupported_quantization"):
        read_checkpoint_format(raw, ConfigReader(raw, directory / "config.json"))
    if len(problems) == count:
        with _collect_errors(problems, "unsupported_config"):
            fields["config"] = read_model_config(directory)
            fields["sampling_defaults"] = format_sampling_defaults(read_sampling_defaults(directory))
    return fields


def _read_weights(directory: Path, problems: list[CheckpointProblem]) -> dict[str, Any]:
    has_index = (directory / "model.safetensors.index.json").exists()
    is_pickled = not any(directory.glob("*.safetensors")) and any(any(directory.glob(name)) for name in _PICKLED)
    paths: list[Path] = []
    with _collect_errors(problems, "pickled_weights" if is_pickled and not has_index else "missing_file"):
        paths = weight_files(directory)
    entries: dict[Path, dict[str, StoredTensor]] = {}
    with _collect_errors(problems, "damaged_file"):
        entries = read_tensor_entries(directory) if paths else {}
    sizes, counts = Counter[str](), Counter[str]()
    for tensor in chain.from_iterable(tensors.values() for tensors in entries.values()):
        sizes[tensor.dtype] += tensor.num_bytes
        counts[tensor.dtype] += prod(tensor.shape)
    return _weight_fields(len(paths), sizes, counts)


def _weight_fields(num_files: int, sizes: Counter[str], counts: Counter[str]) -> dict[str, Any]:
    return {
        "num_files": num_files,
        "stored_bytes": sizes.total(),
        "float_values": sum(counts[dtype] for dtype in _FLOAT_DTYPES),
        "packed_bytes": sum(size for dtype, size in sizes.items() if dtype not in _FLOAT_DTYPES),
        "dtypes": {_FLOAT_DTYPES.get(dtype, dtype.lower()): size for dtype, size in sizes.items()},
    }


def _read_tokenizer(directory: Path, problems: list[CheckpointProblem]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch, _collect_errors(problems, "unsupported_tokenizer"):
        if source := find_source(directory):
            link_with_tokenizer(source, Path(scratch))
        tokenizer = Tokenizer.from_dir(scratch if source else directory)
        tool_format, reasoning_format = tokenizer.tool_format, tokenizer.reasoning_format
        return {
            "tokenizer": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "has_chat_template": tokenizer.has_chat_template,
            "tool_parser": tool_format.name if tool_format else "none",
            "reasoning_parser": reasoning_format.name if reasoning_format else "none",
            "template_adaptations": tuple(tokenizer.probe_template().adaptations),
        }
    return {}


def _inspect_gguf(path: Path) -> CheckpointReport:
    # Only a GGUF file needs numpy and the package gguf.
    from inference_worker.checkpoints.gguf_architectures import architecture_of
    from inference_worker.checkpoints.gguf_convert import write_settings
    from inference_worker.checkpoints.gguf_fields import Fields
    from inference_worker.checkpoints.gguf_file import GGUFFile

    problems: list[CheckpointProblem] = []
    fields: dict[str, Any] = {}
    try:
        with GGUFFile(path) as file, tempfile.TemporaryDirectory() as scratch:
            architecture, license_name = (file.fields.get(f"general.{key}") for key in ("architecture", "license"))
            fields |= {"architecture": str(architecture), "num_files": 1, "license": _short_text(license_name)}
            fields |= _gguf_weights(file)
            with _collect_errors(problems, "unsupported_config"):
                metadata = Fields(file)
                with _collect_errors(problems, "unsupported_architecture"):
                    architecture_of(metadata)
            with _collect_errors([] if problems else problems, "unsupported_config"):
                write_settings(file, Path(scratch))
                fields["config"] = read_model_config(Path(scratch))
                fields["sampling_defaults"] = format_sampling_defaults(read_sampling_defaults(Path(scratch)))
                fields |= _read_tokenizer(Path(scratch), problems)
    except GGUFError as exc:
        problems.append(CheckpointProblem("damaged_file", str(exc)))
    return CheckpointReport(path=path, format="gguf", problems=tuple(problems), **fields)


def _gguf_weights(file: Any) -> dict[str, Any]:
    sizes, values, kept = Counter[str](), 0, Counter[str]()
    for tensor in file.tensors.values():
        kind = tensor.tensor_type.name.lower()
        values += prod(tensor.shape)
        sizes[kind] += tensor.size
        if kind in KEPT_BLOCKS and tensor.name.startswith("blk."):
            kept[kind] += prod(tensor.shape)
    main = max(sizes, key=sizes.__getitem__, default=None)
    return {
        "stored_bytes": sizes.total(),
        "float_values": values,  # a conversion dequantizes all tensors, unless their blocks are kept
        "kept_values": kept.total(),
        "kept_bytes": int(sum(count * KEPT_BLOCKS[kind].loaded_bytes for kind, count in kept.items())),
        "dtypes": dict(sizes),
        "quantization": None if main in ("f32", "f16", "bf16") else main,
    }


@contextmanager
def _collect_errors(problems: list[CheckpointProblem], code: ProblemCode) -> Iterator[None]:
    """Add an error to the problems instead of raising it."""
    try:
        yield
    except (ModelError, GGUFError) as exc:
        problems.append(CheckpointProblem(code, str(exc)))


def _license(directory: Path) -> str | None:
    """Return the license in the manifest of a pulled model, or in the model card."""
    try:
        manifest = read_json(directory / MANIFEST) if (directory / MANIFEST).exists() else {}
        if name := _short_text(manifest.get("license")):
            return name
        with (directory / "README.md").open("rb") as file:
            card = file.read(_MAX_CARD_BYTES).decode("utf-8", "replace")
    except (OSError, ModelError):
        return None
    head = card[4:].partition("\n---")[0] if card.startswith("---\n") else ""
    match = _LICENSE_LINE.search(head)
    return match[1] if match else None


def _short_text(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable() else None
