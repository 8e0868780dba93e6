"""The disk's reserve: released when the disk is almost full, and created again when there is space."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.environment import disk_reserve
from millrace.environment.disk_reserve import FILE_NAME, DiskReserve, watched_directories

MIB = 2**20


def test_the_reserve_is_released_when_the_disk_is_almost_full_and_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = 1000 * MIB  # free, except for the reserve

    def free(_: Path) -> int:
        return others - (reserve.stat().st_size if reserve.exists() else 0)

    monkeypatch.setattr(disk_reserve, "free_bytes", free)
    reserve = tmp_path / FILE_NAME
    keeper = DiskReserve(tmp_path, 4 * MIB)
    assert keeper.adjust() is None
    assert reserve.stat().st_size == 2 * MIB
    assert reserve.stat().st_blocks * 512 >= 2 * MIB  # allocated space, not a sparse file
    others = 4 * MIB
    assert keeper.adjust() is None
    others = 3 * MIB - 1  # a quarter of the minimum is free in addition to the reserve
    assert "almost full" in str(keeper.adjust())
    assert not reserve.exists()
    assert keeper.adjust() is None
    others = 7 * MIB - 1  # with the reserve, new requests would be rejected again
    assert keeper.adjust() is None
    others = 7 * MIB
    assert "space again" in str(keeper.adjust())
    assert reserve.exists()
    assert DiskReserve(tmp_path, 0).adjust() is None
    assert not reserve.exists()


def test_a_reserve_that_does_not_fit_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(disk_reserve, "_allocate", full)
    with pytest.raises(OSError, match="No space"):
        DiskReserve(tmp_path, 4 * MIB).adjust()
    assert list(tmp_path.iterdir()) == []


def test_the_embedded_databases_directory_is_watched_if_it_is_elsewhere(tmp_path: Path) -> None:
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    state.mkdir()
    assert watched_directories(state) == [state]
    for folder, watched in ((state / "postgres", [state]), (elsewhere, [state])):
        (state / "postgres.json").write_text(json.dumps({"directory": str(folder)}))
        assert watched_directories(state) == watched
    elsewhere.mkdir()
    assert watched_directories(state) == [state, elsewhere]
