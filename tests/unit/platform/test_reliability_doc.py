"""The table of docs/reliability.md: each guarantee names tests, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@cache
def functions_of(path: Path) -> set[str]:
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, functions)}


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall(TEXT)
    assert len(named) > 30
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / "tests" / file).exists() or name not in functions_of(ROOT / "tests" / file)
    ]
    assert missing == []


def test_every_fault_names_a_test() -> None:
    table = TEXT.split("|---|---|---|\n", 1)[1].split("\n\n", 1)[0].splitlines()
    assert len(table) > 20
    assert [row for row in table if not NAMED.search(row.rsplit("|", 2)[1])] == []
