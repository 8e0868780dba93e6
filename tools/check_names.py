"""Check of names: a public class name is unique in product and benchmarks, a function is not named by one participle or
adjective, and a caught exception is named `exc`. The comment beside a name is a noun phrase with its unit, not the
second half of the name (`tokens  # of the prompt`).
A schema of an API document is named for what it is, without the marks of generators and directions (`BudgetIn`).

    python -m tools.check_names

A name or module that starts with an underscore is private. The modules of a screen of the console are private to it, so
classes of different screens may have the same name. Django finds a management command by the name `Command`.
`functions` in `tools/words.toml` has the names of functions to avoid. Properties are not functions.
The types of the generated client have the names of the API's objects, as the server's models have.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.openapi.formatting import read_yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("platform", "tenants", "billing", "frontend", "inference_worker", "kernels", "tools")
CHECKED = (*PACKAGES, "benchmarks")
API_DOCUMENTS = ("openapi.yaml", "management-openapi.yaml")  # in docs
GENERATED = ROOT / "platform" / "millrace" / "client" / "models.py"
_HALF_PHRASE = re.compile(r"# (of|(by )?which|that|whose|as the next)\b|.*, as the next\b")
SCREENS = (("frontend", "tenant"), ("frontend", "operator"))
_SCHEMA = re.compile(r"[A-Z][a-z]+([A-Z][a-z]*|\d+)*")
_VAGUE_SCHEMA = re.compile(r"^(Patched|Paginated)|(Enum|In|Out|From|By|Made|Whole|Serializer)$")


@dataclass(frozen=True)
class FunctionNames:
    """The names of functions to avoid."""

    avoid: frozenset[str]
    verbs: frozenset[str]
    exceptions: frozenset[str]

    @classmethod
    def read(cls) -> FunctionNames:
        """Read the names from `tools/words.toml`."""
        names: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))["functions"]
        return cls(frozenset(names["avoid"]), frozenset(names["verbs"]), frozenset(names["exceptions"]))

    def find_problems(self, path: Path, tree: ast.Module) -> Iterator[str]:
        """Yield a line for each function of a module, given by its path below the root, that has such a name."""
        parts = path.with_suffix("").parts
        yield from self._find_in(tree, str(path), ".".join(parts[1:] if parts[0] == "platform" else parts))

    def _find_in(self, node: ast.AST, path: str, place: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            name = place
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{place}.{child.name}"
                if not isinstance(child, ast.ClassDef) and not _is_property(child) and self._is_avoided(name):
                    yield f"{path}:{child.lineno}: name the function {child.name} by a verb"
            yield from self._find_in(child, path, name)

    def _is_avoided(self, name: str) -> bool:
        word = name.rpartition(".")[2].lstrip("_")  # a special method keeps its marks
        is_participle = word.endswith("ed") and "_" not in word and word not in self.verbs
        return (word in self.avoid or is_participle) and name not in self.exceptions


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    texts = map(ast.unparse, node.decorator_list)
    return any(text.endswith(("property", ".setter")) for text in texts)


def _screen_of(path: Path) -> tuple[str, ...]:
    """Return the path of the screen whose package contains the module; empty: none."""
    return path.parts[:3] if path.parts[:2] in SCREENS and len(path.parts) > 3 else ()


def checked_modules(root: Path) -> Iterator[Path]:
    """Yield the modules of the product and the benchmarks, without migrations."""
    for package in CHECKED:
        for path in sorted((root / package).rglob("*.py")):
            if "migrations" not in path.parts and path != GENERATED:
                yield path


def public_classes(path: Path, tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield the public classes that a module defines at its top level."""
    if path.stem.startswith("_") and path.stem != "__init__":
        return
    is_command = path.parts[-3:-1] == ("management", "commands")
    for statement in tree.body:
        for node in ast.walk(statement) if isinstance(statement, ast.If | ast.Try) else (statement,):
            if (
                not isinstance(node, ast.ClassDef)
                or node.name.startswith("_")
                or (is_command and node.name == "Command")
            ):
                continue
            yield node


def find_problems(paths: Iterable[Path], root: Path, functions: FunctionNames) -> list[str]:
    """Return a line for each class name that is used twice, function to rename, and exception not named `exc`."""
    classes: defaultdict[str, list[tuple[tuple[str, ...], str]]] = defaultdict(list)
    problems: list[str] = []
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(root)
        for node in public_classes(path, tree):
            classes[node.name].append((_screen_of(name), f"{name}:{node.lineno}"))
        problems += functions.find_problems(name, tree)
        for handler in ast.walk(tree):
            if isinstance(handler, ast.ExceptHandler) and handler.name not in (None, "exc"):
                problems.append(f"{name}:{handler.lineno}: name the exception exc, not {handler.name}")
    for class_name, found in sorted(classes.items()):
        screens, places = zip(*found, strict=True)
        if len(places) > 1 and (() in screens or len({*screens}) < len(screens)):
            problems.append(f"{places[-1]}: class {class_name} is also defined at {', '.join(places[:-1])}")
    return problems


def find_comment_problems(paths: Iterable[Path], root: Path) -> list[str]:
    """Return a line for each comment beside an assignment that continues the name instead of describing the value."""
    problems = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assigned = {
            line
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for item in tokenize.generate_tokens(io.StringIO(text).readline):
            is_beside = item.type == tokenize.COMMENT and item.line[: item.start[1]].strip()
            if is_beside and item.start[0] in assigned and _HALF_PHRASE.match(item.string):
                problems.append(f"{path.relative_to(root)}:{item.start[0]}: name the thing and its unit: {item.string}")
    return problems


def find_schema_problems(document: str, names: Iterable[str]) -> list[str]:
    """Return a line for each schema of an API document whose name is not that of a thing."""
    return [
        f"docs/{document}: name the schema {name} for what it is, such as Budget, BudgetDetail or BudgetCreate"
        for name in names
        if _VAGUE_SCHEMA.search(name) or not _SCHEMA.fullmatch(name)
    ]


def main() -> int:
    """Print the problems; return 1 if there are any."""
    problems = find_problems(checked_modules(ROOT), ROOT, FunctionNames.read())
    problems += find_comment_problems(checked_modules(ROOT), ROOT)
    for document in API_DOCUMENTS:
        schemas = read_yaml((ROOT / "docs" / document).read_text(encoding="utf-8"))["components"]["schemas"]
        problems += find_schema_problems(document, schemas)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
