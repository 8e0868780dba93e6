"""Differences of the OpenAPI documents between the working tree and another commit.

    python -m tools.openapi.changes [COMMIT]

Prints the operations and schemas that were added (+), removed (-) or changed (~), with each changed place. The default
is the commit at which the branch left `main`. Without git or that commit, nothing is compared.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.openapi.formatting import read_yaml

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("docs/openapi.yaml", "docs/management-openapi.yaml")
BRANCHES = ("origin/main", "main")


def list_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a line for each added, removed or changed operation, schema and shared parameter."""
    old, new = dict(_parts(before)), dict(_parts(after))
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            lines.append(f"+ {name}")
        elif name not in new:
            lines.append(f"- {name}")
        elif changed := _changed_places(old[name], new[name]):
            lines += [f"~ {name}", *(f"    {change}" for change in changed)]
    return lines


def _parts(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, operations in document.get("paths", {}).items():
        for verb, operation in operations.items():
            yield f"{verb.upper()} {path}", operation
    for group, components in document.get("components", {}).items():
        for name, component in components.items():
            yield f"{group}/{name}", component


def _changed_places(before: Any, after: Any) -> list[str]:
    old, new = dict(_places(before, "")), dict(_places(after, ""))
    lines = []
    for place in sorted(old.keys() | new.keys()):
        if place not in old:
            lines.append(f"+ {place}: {new[place]}")
        elif place not in new:
            lines.append(f"- {place}: {old[place]}")
        elif old[place] != new[place]:
            lines.append(f"~ {place}: {old[place]} -> {new[place]}")
    return lines


def _places(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each leaf. A list of plain values has a place for each value."""
    if isinstance(node, Mapping):
        pairs = [(str(key), value) for key, value in node.items()]
    elif isinstance(node, list):
        pairs = [(_label(item, index), item) for index, item in enumerate(node)]
    else:
        yield place, node
        return
    for name, value in pairs:
        yield from _places(value, f"{place}.{name}" if place else name)


def _label(item: Any, index: int) -> str:
    """Return what identifies an item of a list: its name, its reference, itself, or its position."""
    if isinstance(item, Mapping):
        return str(item.get("name") or item.get("$ref") or index)
    return str(index) if isinstance(item, list) else str(item)


def base_commit(root: Path) -> str | None:
    """Return the newest commit of `main` in this branch, if git knows it."""
    for branch in BRANCHES:
        if commit := _git(root, "merge-base", "HEAD", branch):
            return commit.strip()
    return None


def read_document(root: Path, commit: str, name: str) -> dict[str, Any]:
    """Return a document as of a commit; an empty one if it did not exist."""
    text = _git(root, "show", f"{commit}:{name}")
    return read_yaml(text) if text else {}


def _git(root: Path, *arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    result = subprocess.run([git, "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return result.stdout if result.returncode == 0 else None


def main() -> None:
    """Print the differences."""
    commit = sys.argv[1] if len(sys.argv) > 1 else base_commit(ROOT)
    if commit is None:
        print("No commit to compare the API documents with.")
        return
    for name in DOCUMENTS:
        current = read_yaml((ROOT / name).read_text(encoding="utf-8"))
        lines = list_changes(read_document(ROOT, commit, name), current)
        print(
            f"{name}: {len([line for line in lines if line[0] != ' '])} changes since {commit[:12]}", *lines, sep="\n"
        )


if __name__ == "__main__":
    main()
