"""The choice of the device, and its free memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from inference_worker.contract.engine_config import DeviceName

_MEMINFO, _MEMBERSHIP, _CONTROL_GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


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


def free_memory(device: torch.device) -> int:
    """Return the bytes of free memory of the device. On the CPU, this is the memory that can be used without swapping,
    within the limits of the process's control group and its parents."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory of freed tensors
        free, _ = torch.cuda.mem_get_info(device)
        return free
    lines = (line.split() for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    available = next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
    return min([available, *_free_in_control_groups()])


def _free_in_control_groups() -> Iterator[int]:
    """Yield the bytes below the limit of the process's control group and of each of its parents.

    In a container, the path may be the host's. Groups that are not visible have no files here.
    """
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = _CONTROL_GROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # version 1
            root = _CONTROL_GROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = Path("" if ".." in Path(path).parts else path.strip("/"))
        for place in (group, *group.parents):
            if (free := _free_in_control_group(root / place, *names)) is not None:
                yield free


def _free_in_control_group(directory: Path, limit_name: str, used_name: str, cached_name: str) -> int | None:
    """Return the bytes below the control group's limit, or None without a limit. Cached files count as free."""

    def read(name: str) -> str:
        return (directory / name).read_text(encoding="ascii").strip()

    try:
        limit, used = read(limit_name), int(read(used_name))
        stat = dict(line.split() for line in read("memory.stat").splitlines())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(stat.get(cached_name, 0)))
