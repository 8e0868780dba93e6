"""The GPUs of this machine, found without a driver's library or PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

_MODEL = re.compile(r"^Model:\s*(.+)$", re.MULTILINE)


def find_gpus(root: Path = Path("/")) -> list[str]:
    """Return the names of the GPUs of which a driver is loaded. `root` is the root of the file system."""
    names = []
    for information in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        found = _MODEL.search(information.read_text(encoding="utf-8", errors="replace"))
        names.append(found[1].strip() if found else "NVIDIA GPU")
    if not names:  # such as in a container without that part of /proc
        names = ["NVIDIA GPU" for _ in root.glob("dev/nvidia[0-9]*")]
    if (root / "dev" / "kfd").exists():
        names.append("AMD GPU")
    return names
