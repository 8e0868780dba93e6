"""The runnable code blocks of the documentation, and the programs in examples/, on the running platform."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.code_blocks import ROOT, Session, blocks_of, matches, replacements_for
from tests.support.stack import Stack

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if any(block.is_runnable for block in blocks_of(page.read_text(encoding="utf-8")))
]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def session(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """An empty directory with the platform's data directory and `manage.py`, as in a checkout."""
    (tmp_path / ".millrace").symlink_to(stack.data_dir)
    (tmp_path / "manage.py").symlink_to(ROOT / "manage.py")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "DJANGO_"))}
    environment["MILLRACE_DATA_DIR"] = str(stack.data_dir)
    for name in ("MILLRACE_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        environment[name] = stack.key
        monkeypatch.setenv(name, stack.key)
    before = dict(os.environ)
    yield Session(tmp_path, environment, replacements_for(stack.url))
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_runnable_blocks_of_a_page_run(page: Path, session: Session) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.is_runnable:
            output = session.run(block)
            if following is not None and following.is_output:
                assert matches(following.code, output), f"line {following.line}: {output}"
