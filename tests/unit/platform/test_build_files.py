"""Generated files are built when their sources have changed, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.build_files import GeneratedFiles, build, generated_files


@pytest.fixture
def files(tmp_path: Path) -> GeneratedFiles:
    """Two files that are made from one source: its text in upper and lower case."""
    source = tmp_path / "source.txt"
    source.write_text("One")
    outputs = (tmp_path / "upper.txt", tmp_path / "lower.txt")
    return GeneratedFiles(
        "letters", (source,), outputs, lambda: (source.read_bytes().upper(), source.read_bytes().lower())
    )


def test_files_are_built_when_a_source_changes(files: GeneratedFiles, tmp_path: Path) -> None:
    state = tmp_path / "build" / "state.json"
    assert build([files], state) == ["letters"]
    assert [output.read_text() for output in files.outputs] == ["ONE", "one"]
    files.outputs[0].write_text("kept")
    assert build([files], state) == []
    assert files.outputs[0].read_text() == "kept"
    files.sources[0].write_text("Two")
    assert build([files], state) == ["letters"]
    assert [output.read_text() for output in files.outputs] == ["TWO", "two"]


def test_a_missing_file_is_built_again(files: GeneratedFiles, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    build([files], state)
    files.outputs[1].unlink()
    assert build([files], state) == ["letters"]
    assert files.outputs[1].read_text() == "one"


def test_the_files_of_the_packages_have_sources_in_git() -> None:
    found = generated_files()
    assert {output.suffix for files in found for output in files.outputs} == {".py", ".json", ".mo", ".js"}
    assert all(source.exists() for files in found for source in files.sources)
