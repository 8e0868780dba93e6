"""The choice among the bundled models, which `millrace up` serves if MILLRACE_MODELS is not set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from inference_worker.contract.cpu_topology import read_quota
from inference_worker.contract.settings import ModelSpec

# For a copy of a model in another format: on fewer cores, its load delays the other processes by most of a minute.
MIN_CORES = 4
MIN_MEMORY = 12 << 30
_LIMIT = Path("/sys/fs/cgroup/memory.max")


class MachineSize(NamedTuple):
    """The processors and the memory that this process may use."""

    cores: int
    memory: int


class ModelChoice(NamedTuple):
    """The chosen models, and the reason if some were left out."""

    models: tuple[ModelSpec, ...]
    reason: str = ""


def read_machine_size(root: Path = Path("/")) -> MachineSize:
    """Return the processors and the memory that the process may use, within the limits of its control groups.

    Args:
        root: the directory with `proc` and `sys`.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no limit: the file is missing or contains "max"
        memory = min(memory, int(_LIMIT.read_text(encoding="ascii")))
    quota = read_quota(root)
    cores = len(os.sched_getaffinity(0))
    return MachineSize(cores if quota is None else max(1, min(cores, int(quota))), memory)


def choose_models(models: Sequence[ModelSpec], machine: MachineSize) -> ModelChoice:
    """Leave out quantized copies of a bundled model on a small machine."""
    if machine.cores >= MIN_CORES and machine.memory >= MIN_MEMORY:
        return ModelChoice(tuple(models))
    chosen = tuple(spec for spec in models if spec.quantization == "none")
    left_out = ", ".join(spec.name for spec in models if spec not in chosen)
    if not left_out:
        return ModelChoice(chosen)
    return ModelChoice(
        chosen,
        f"{left_out} is not served: this machine has {machine.cores} cores and {machine.memory / 2**30:.1f} GiB of"
        f" memory, and it needs {MIN_CORES} and {MIN_MEMORY >> 30}. To serve it, set MILLRACE_MODELS.",
    )
