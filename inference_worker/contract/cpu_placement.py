"""Where an engine computes on the CPU: on the cores of one memory node, or on all of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from inference_worker.contract.cpu_topology import CpuTopology

AUTO, ALL = "auto", "all"  # memory nodes: the one with the fewest workers, or all
_claims: list[IO[str]] = []  # locked for the life of this process


@dataclass(frozen=True, slots=True)
class CpuPlacement:
    """The CPUs of an engine, and how many threads compute there."""

    cpus: frozenset[int]
    threads: int

    @contextmanager
    def bind(self) -> Iterator[None]:
        """Bind the calling thread to the CPUs during the context, and permanently the threads that it starts there.

        Memory that they write first is on their memory node.
        """
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cpus)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def parse_node(text: str) -> str:
    """Check the setting of the memory node.

    Raises:
        ValueError: it is neither a number nor one of the words.
    """
    if text not in (AUTO, ALL) and not (text.isascii() and text.isdigit()):
        raise ValueError(f"want {AUTO}, {ALL} or the number of a memory node")
    return text


def choose_placement(
    topology: CpuTopology, *, node: str = AUTO, threads: int = 0, claims: Path | None = None
) -> CpuPlacement:
    """Return where the engine of this process computes.

    Args:
        node: a memory node's number, auto or all.
        threads: 0: one for each core, as far as the quota of the control groups allows.
        claims: the directory of the locks that spread the workers of a host over its memory nodes.

    Raises:
        ValueError: the process may use no CPU of the memory node.
    """
    nodes = topology.usable_nodes()
    if node == ALL or (node == AUTO and len(nodes) < 2):
        cpus = topology.allowed
    elif node == AUTO:
        cpus = nodes[min(nodes) if claims is None else _claim_node(nodes, claims)]
    elif int(node) in nodes:
        cpus = nodes[int(node)]
    else:
        known = ", ".join(map(str, nodes))
        raise ValueError(f"MILLRACE_CPU_NODE: this process may use no CPU of memory node {node}; set it to {known}")
    return CpuPlacement(cpus, threads or topology.count_threads(cpus))


def _claim_node(nodes: Mapping[int, frozenset[int]], directory: Path) -> int:
    """Return the memory node with the fewest workers. The end of the process ends its claim."""
    directory.mkdir(parents=True, exist_ok=True)
    for place in count():
        for number in sorted(nodes):
            claim = (directory / f"{number}-{place}").open("a")
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                claim.close()
                continue
            _claims.append(claim)
            return number
    raise AssertionError("the places do not end")
