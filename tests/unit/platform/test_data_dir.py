"""Directories outside the data directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from millrace.local.data_dir import copy_tree_once


def test_processes_that_copy_the_same_files_share_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "copies" / "program"
    source.mkdir()
    (source / "postgres").write_text("program")
    copy2, pid = shutil.copy2, os.getpid()

    def copy_after_another_process(*args: str) -> str:
        monkeypatch.setattr(shutil, "copy2", copy2)
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        copy_tree_once(source, ("postgres",), target)
        return copy2(*args)

    monkeypatch.setattr(shutil, "copy2", copy_after_another_process)
    assert copy_tree_once(source, ("postgres",), target) == target
    assert [path.name for path in target.parent.iterdir()] == ["program"]
    assert (target / "postgres").read_text() == "program"
