"""The choice of the device, and its free memory."""

from __future__ import annotations

from pathlib import Path

import torch

from inference_worker.contract.control_groups import ControlGroup, find_control_groups
from inference_worker.contract.engine_config import DeviceName

# Names in a control group, by its version: the limit, the use, and the entry of memory.stat for cached files.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def pick_device(name: DeviceName) -> torch.device:
    """Return the device of this name.

    Raises:
        ValueError: the device is not available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch finds no CUDA device")
    return torch.device(name)


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Return the bytes of free memory of the device. On the CPU, this is the memory that can be used without swapping,
    within the limits of the process's control group and its parents.

    Args:
        root: the directory with `proc` and `sys`.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory of freed tensors
        free, _ = torch.cuda.mem_get_info(device)
        return free
    lines = (line.split() for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    available = next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
    limits = (_free_in_control_group(group) for group in find_control_groups("memory", root))
    return min([available, *(free for free in limits if free is not None)])


def _free_in_control_group(group: ControlGroup) -> int | None:
    """Return the bytes below the control group's limit, or None without a limit. Cached files count as free."""

    def read(name: str) -> str:
        return (group.directory / name).read_text(encoding="ascii").strip()

    limit_name, used_name, cached_name = _FILES[group.version]
    try:
        limit, used = read(limit_name), int(read(used_name))
        stat = dict(line.split() for line in read("memory.stat").splitlines())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(stat.get(cached_name, 0)))
