"""Free space: low below the minimum, until it is 25% above the minimum."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from inference_worker.contract import disk
from inference_worker.contract.disk import FreeSpace

MIB = 2**20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Set the free bytes by directory name."""
    found: dict[str, int] = {}

    def statvfs(folder: Path) -> SimpleNamespace:
        if folder.name not in found:
            raise FileNotFoundError(folder)
        return SimpleNamespace(f_bavail=found[folder.name] // 4096, f_frsize=4096)

    monkeypatch.setattr(disk.os, "statvfs", statvfs)
    return found


def test_space_is_low_below_the_minimum_until_a_quarter_more_is_free(free: dict[str, int]) -> None:
    space = FreeSpace([Path("a")], 100 * MIB)
    looks = [(101, False), (99, True), (101, True), (124, True), (125, False), (101, False), (99, True)]
    for mib, is_low in looks:
        free["a"] = mib * MIB
        assert space.look() is is_low, mib
    assert space.describe() == "99 MiB are free: new requests are rejected until 125 MiB are free"


def test_the_fullest_disk_counts_and_a_missing_one_does_not(free: dict[str, int]) -> None:
    space = FreeSpace([Path("a"), Path("b"), Path("gone")], 100 * MIB)
    free |= {"a": 500 * MIB, "b": 50 * MIB}
    assert space.look()
    free["b"] = 500 * MIB
    assert not space.look()
    del free["a"], free["b"]
    assert not space.look()  # unknown: as before
    assert space.describe() == "ok"


def test_a_minimum_of_zero_watches_no_disk(free: dict[str, int]) -> None:
    space = FreeSpace([Path("a")], 0)
    free["a"] = 0
    assert not space.look()


def test_the_free_space_of_a_real_disk_is_read(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert disk.free_bytes(tmp_path) == pytest.approx(found.f_bavail * found.f_frsize, rel=0.2)
    assert FreeSpace([tmp_path], 1 << 60).look()
