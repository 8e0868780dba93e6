"""Default names of workers, which differ between data directories and stay the same in one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inference_worker.contract.worker_names import ID_FILE, default_name, read_worker_id


def test_a_name_is_stable_in_its_data_directory_and_differs_in_another(tmp_path: Path) -> None:
    name = default_name("m", tmp_path / "a")
    assert name == default_name("m", tmp_path / "a") == f"m-{(tmp_path / 'a' / ID_FILE).read_text().strip()}"
    assert name != default_name("m", tmp_path / "b")


def test_processes_that_start_together_get_one_id(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(read_worker_id, [tmp_path / "new"] * 64))) == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == [ID_FILE]


@pytest.mark.parametrize("text", ["", "3f9a", "3f9a1c2b.x", "../../etc"])
def test_a_damaged_id_is_reported_with_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / ID_FILE).write_text(text)
    with pytest.raises(SystemExit, match=f"MILLRACE_DATA_DIR: .*{ID_FILE} is damaged"):
        read_worker_id(tmp_path)


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="MILLRACE_DATA_DIR: "):
        read_worker_id(tmp_path / "file")
