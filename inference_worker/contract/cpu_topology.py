"""The CPUs that this process may use: their cores, their memory nodes, and the limit of its control groups.

The functions read files below `root`, so that tests use recorded ones. A file that is missing limits nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from inference_worker.contract.control_groups import ControlGroup, find_control_groups

_CPUS, _NODES = "sys/devices/system/cpu", "sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """The CPUs of a machine, and what this process may use of them.

    allowed: the CPUs that the process may use.
    cores: the CPUs of each physical core. The two hyperthreads of a core share its arithmetic units.
    nodes: the CPUs of each memory node. A CPU reads the memory of another node more slowly.
    quota: CPUs of time that the control groups allow; None: no limit.
    """

    allowed: frozenset[int]
    cores: frozenset[frozenset[int]]
    nodes: Mapping[int, frozenset[int]]
    quota: float | None = None

    def count_threads(self, cpus: Set[int] | None = None) -> int:
        """Return the threads that compute fastest on these CPUs, or on all that are allowed: one for each core.

        A quota is rounded down: a thread that has used up its time delays the others, which wait for it.
        """
        used = self.allowed if cpus is None else cpus
        cores = sum(1 for core in self.cores if core & used)
        return max(1, cores if self.quota is None else min(cores, int(self.quota)))

    def usable_nodes(self) -> dict[int, frozenset[int]]:
        """Return the allowed CPUs of each memory node that has some."""
        return {number: cpus & self.allowed for number, cpus in self.nodes.items() if cpus & self.allowed}


def read_topology(allowed: Set[int] | None = None, root: Path = Path("/")) -> CpuTopology:
    """Return the machine's CPUs.

    Args:
        allowed: the CPUs that the process may use; those of its affinity if not given.
        root: the directory with `proc` and `sys`.
    """
    allowed = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    cpus = parse_cpus(_read(root / _CPUS / "online")) | allowed
    nodes = {
        int(path.name.removeprefix("node")): parse_cpus(_read(path / "cpulist"))
        for path in sorted((root / _NODES).glob("node[0-9]*"))
    }
    nodes = {number: found for number, found in nodes.items() if found}  # others have memory only
    return CpuTopology(allowed, frozenset(_read_core(root, cpu) for cpu in cpus), nodes or {0: cpus}, read_quota(root))


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it, such as 0-3,8."""
    parts = (part.partition("-") for part in text.split(",") if part.strip())
    return frozenset(cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1))


def read_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs of time that the process's control group and its parents allow, or None without a limit."""
    found = [quota for group in find_control_groups("cpu", root) if (quota := _read_group(group)) is not None]
    return min(found, default=None)


def _read_group(group: ControlGroup) -> float | None:
    if group.version == 2:  # "150000 100000", or "max 100000"
        quota, _, period = _read(group.directory / "cpu.max").partition(" ")
    else:
        quota, period = (_read(group.directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read_core(root: Path, cpu: int) -> frozenset[int]:
    return parse_cpus(_read(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list")) | {cpu}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
