"""References in the docs: the tests they name exist, and each guarantee of docs/reliability.md names one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"`(?:tests/)?([\w/]+/test_\w+\.py)(?:::(\w+))?`")  # from the root, or from tests/


@cache
def functions_of(path: Path) -> set[str]:
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, functions)}


def test_every_test_named_in_the_docs_exists() -> None:
    named = {(page.name, *found) for page in PAGES for found in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 100
    missing = [
        f"{page}: {file}::{name}"
        for page, file, name in sorted(named)
        if not (ROOT / "tests" / file).exists() or (name and name not in functions_of(ROOT / "tests" / file))
    ]
    assert missing == []


def test_every_fault_names_a_test() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = text.split("|---|---|---|\n", 1)[1].split("\n\n", 1)[0].splitlines()
    assert len(table) > 20
    assert [row for row in table if not NAMED.search(row.rsplit("|", 2)[1])] == []
