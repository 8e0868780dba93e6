"""Published model files of `make test-models`, in the directory that MILLRACE_TEST_MODELS names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "MILLRACE_TEST_MODELS"


@dataclass(frozen=True)
class RealModel:
    """A published file, by its SHA-256. Its name in the directory does not matter."""

    name: str
    file: str
    sha256: str
    license: str
    num_bytes: int


QWEN = RealModel(
    "qwen2.5-coder-0.5b-instruct",
    "Qwen2.5-Coder-0.5B-Instruct Q4_K_M",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "Apache-2.0",
    491_400_064,
)
GEMMA = RealModel(
    "gemma-3-270m",
    "Gemma 3 270M Q4_K_M",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "Gemma Terms of Use",
    253_113_024,
)
MODELS = (GEMMA, QWEN)


class MissingModelsError(Exception):
    """An error that names the files that are missing."""


def find_models() -> dict[str, Path]:
    """Return the files by the names of their models.

    Raises:
        MissingModelsError: the variable is not set, or the directory does not have each file.
    """
    directory = os.environ.get(VARIABLE, "")
    if not directory or not Path(directory).is_dir():
        raise MissingModelsError(_describe(MODELS, f"{directory or 'nothing'}, which is no directory"))
    digests = {}
    for path in sorted(Path(directory).rglob("*.gguf")):
        if path.stat().st_size in {model.num_bytes for model in MODELS}:
            with path.open("rb") as file:
                digests[hashlib.file_digest(file, "sha256").hexdigest()] = path
    if missing := [model for model in MODELS if model.sha256 not in digests]:
        raise MissingModelsError(_describe(missing, directory))
    return {model.name: digests[model.sha256] for model in MODELS}


def _describe(missing: Sequence[RealModel], found: str) -> str:
    lines = [f"  {model.file}, {model.num_bytes:,} bytes, SHA-256 {model.sha256}" for model in missing]
    return "\n".join(
        [f"{VARIABLE} must name a directory with these GGUF files, under any names; it is {found}:", *lines]
    )
