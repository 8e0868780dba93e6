"""Which files a checkpoint is made of. Free of torch."""

from __future__ import annotations

import re
from pathlib import Path

from inference_worker.contract.config import ModelError, read_json

MAX_WEIGHT_FILES = 1024


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model directory `folder`, by its index if it has one.

    Raises:
        ModelError: there are none, or the index names a file outside the directory.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        pickled = any(any(folder.glob(f"*.{suffix}")) for suffix in ("bin", "pt", "pth"))
        hint = "; its pickled weights can run code and are not read: convert them to safetensors" if pickled else ""
        raise ModelError(f"{folder}: no safetensors files{hint}")
    if len(names) > MAX_WEIGHT_FILES:
        raise ModelError(f"{folder}: {len(names)} weight files are too many")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", name):
            raise ModelError(f"{index}: {name!r} is not the name of a safetensors file in this directory")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: no such file, but the index names it")
    return [folder / name for name in names]
