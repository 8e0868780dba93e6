"""The control groups of this process: those that limit its memory and CPU time, such as those of a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ControlGroup(NamedTuple):
    """The directory of a control group's files, and their version, 1 or 2."""

    directory: Path
    version: int


def find_control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the process's control group and each of its parents.

    In a container, the path may be the host's. Groups that are not visible have no files here.

    Args:
        controller: what the groups limit, such as cpu or memory.
        root: the directory with `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # A controller of version 1 has its own hierarchy.
        top, version = (root / "sys/fs/cgroup" / controller, 1) if controllers else (root / "sys/fs/cgroup", 2)
        group = Path("" if ".." in Path(path).parts else path.strip("/"))
        for place in (group, *group.parents):
            yield ControlGroup(top / place, version)
