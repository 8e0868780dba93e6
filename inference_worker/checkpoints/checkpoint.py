"""The weight files of a checkpoint. Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

from inference_worker.checkpoints.model_config import ModelError, read_json
from inference_worker.checkpoints.safetensors_header import StoredTensor, read_header

MAX_WEIGHT_FILES = 1024


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of the model directory, from its index if it has one.

    Raises:
        ModelError: there are no files, or the index names a file outside of the directory.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        pickled = any(any(directory.glob(f"*.{suffix}")) for suffix in ("bin", "pt", "pth"))
        hint = "; its pickled weights can run code and are not read: convert them to safetensors" if pickled else ""
        raise ModelError(f"{directory}: no safetensors files{hint}")
    if len(names) > MAX_WEIGHT_FILES:
        raise ModelError(f"{directory}: {len(names)} weight files are too many")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", name):
            raise ModelError(f"{index}: {name!r} is not the name of a safetensors file in this directory")
        if not (directory / name).is_file():
            raise ModelError(f"{directory / name}: no such file, but the index names it")
    return [directory / name for name in names]


def read_tensor_entries(directory: Path) -> dict[Path, dict[str, StoredTensor]]:
    """Return the tensors of each weight file of the model directory, from the files' headers.

    Raises:
        ModelError: a file is missing, damaged or incomplete, or two files have the same tensor.
    """
    entries: dict[Path, dict[str, StoredTensor]] = {}
    names: set[str] = set()
    for path in weight_files(directory):
        entries[path] = read_header(path)
        if repeated := names & entries[path].keys():
            raise ModelError(f"{path}: tensor {min(repeated)!r:.80} is in another file, too")
        names |= entries[path].keys()
    return entries
