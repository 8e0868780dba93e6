"""The imports of the project's source files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"millrace", "tenants", "billing", "frontend", "inference_worker", "kernels"}


def imports(folder: Path, word: str = "") -> Iterator[tuple[str, str]]:
    """Yield (file:line, dotted name) of every import below `folder`, also inside functions.

    Files without `word` are skipped, which takes a tenth of the time.
    """
    assert folder.is_dir()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if word not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                yield from ((where, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{where}: relative import"
                # `from a import b` may name the module a.b
                yield from ((where, f"{node.module}.{alias.name}") for alias in node.names)


def within(name: str, allowed: set[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)
