"""Threads and memory nodes on recorded machines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from inference_worker.contract import cpu_placement
from inference_worker.contract.cpu_placement import ALL, AUTO, CpuPlacement, choose_placement, parse_node
from inference_worker.contract.cpu_topology import parse_cpus, read_quota, read_topology


def write_machine(
    root: Path, *, siblings: Sequence[str], nodes: Mapping[int, str], files: Mapping[str, str] | None = None
) -> Path:
    """Write the files of a machine below `root`, and return it.

    Args:
        siblings: the CPUs of each core.
        nodes: the CPUs of each memory node.
        files: further files by path.
    """
    cpus = sorted(cpu for core in siblings for cpu in parse_cpus(core))
    contents = {"sys/devices/system/cpu/online": ",".join(map(str, cpus)), **(files or {})}
    for core in siblings:
        for cpu in parse_cpus(core):
            contents[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = core
    contents |= {f"sys/devices/system/node/node{node}/cpulist": text for node, text in nodes.items()}
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


SERVER = [f"{core},{core + 16}" for core in range(16)]  # CPUs 16 to 31 are the second hyperthreads
SERVER_NODES = {0: "0-7,16-23", 1: "8-15,24-31"}


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A machine with two memory nodes of 8 cores with two hyperthreads each."""
    return write_machine(tmp_path, siblings=SERVER, nodes=SERVER_NODES)


def test_one_node_without_hyperthreads(tmp_path: Path) -> None:
    topology = read_topology({0, 1, 2, 3}, write_machine(tmp_path, siblings=["0", "1", "2", "3"], nodes={0: "0-3"}))
    assert choose_placement(topology) == CpuPlacement(frozenset(range(4)), 4)
    assert topology.quota is None


def test_a_core_has_one_thread_and_a_worker_one_node(server: Path) -> None:
    topology = read_topology(set(range(32)), server)
    first, second = (frozenset(parse_cpus(text)) for text in SERVER_NODES.values())
    assert len(topology.cores) == 16
    assert choose_placement(topology) == CpuPlacement(first, 8)
    assert choose_placement(topology, node="1") == CpuPlacement(second, 8)
    assert choose_placement(topology, node=ALL) == CpuPlacement(first | second, 16)
    assert choose_placement(topology, threads=3).threads == 3
    with pytest.raises(ValueError, match=r"MILLRACE_CPU_NODE: .* no CPU of memory node 2; set it to 0, 1"):
        choose_placement(topology, node="2")


def test_the_affinity_leaves_some_cpus_of_some_nodes(server: Path) -> None:
    cpuset = {9, 10, 25, 26, 27}  # both hyperthreads of two cores, and one of a third
    topology = read_topology(cpuset, server)
    assert topology.usable_nodes() == {1: frozenset(cpuset)}
    assert choose_placement(topology) == CpuPlacement(frozenset(cpuset), 3)


def test_a_node_without_cpus_is_memory_only(tmp_path: Path) -> None:
    root = write_machine(tmp_path, siblings=["0", "1"], nodes={0: "0-1", 2: ""})
    assert read_topology({0, 1}, root).nodes == {0: frozenset({0, 1})}


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None, 8),
        (
            {
                "proc/self/cgroup": "0::/pod/container",
                "sys/fs/cgroup/pod/cpu.max": "300000 100000",
                "sys/fs/cgroup/pod/container/cpu.max": "max 100000",
            },
            3.0, 3,
        ),
        (
            {
                "proc/self/cgroup": "9:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n0::/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2.5, 2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/a",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            None, 8,
        ),
        ({}, None, 8),
    ],
    ids=["1.5 CPUs", "half a CPU", "no limit", "parent", "version 1", "version 1 without a limit", "no groups"],
)  # fmt: skip
def test_the_quota_of_the_control_groups_limits_threads(
    files: Mapping[str, str], quota: float | None, threads: int, tmp_path: Path
) -> None:
    write_machine(tmp_path, siblings=SERVER, nodes=SERVER_NODES, files=files)
    assert read_quota(tmp_path) == quota
    assert choose_placement(read_topology(set(range(32)), tmp_path)).threads == threads


def test_a_machine_without_these_files_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    topology = read_topology({2, 5}, tmp_path)
    assert choose_placement(topology) == CpuPlacement(frozenset({2, 5}), 2)


def test_workers_of_a_host_are_spread_over_its_nodes(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_placement, "_claims", [])
    topology = read_topology(set(range(32)), server)
    found = [min(choose_placement(topology, claims=tmp_path / "claims").cpus) for _ in range(4)]
    assert found == [0, 8, 0, 8]
    cpu_placement._claims.pop(0).close()  # the end of the first worker
    assert min(choose_placement(topology, claims=tmp_path / "claims").cpus) == 0


def test_the_calling_thread_is_bound_only_during_the_context() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    with CpuPlacement(one, 1).bind():
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before


def test_the_setting_is_a_number_or_a_word() -> None:
    assert [parse_node(text) for text in (AUTO, ALL, "1")] == [AUTO, ALL, "1"]
    for text in ("first", "-1", "", "0-3"):
        with pytest.raises(ValueError, match="want auto, all or the number of a memory node"):
            parse_node(text)
