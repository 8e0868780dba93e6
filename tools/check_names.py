"""Check of names: a public class name is unique in product and benchmarks, and a caught exception is named `exc`.
The comment beside a name is a noun phrase with its unit, not the second half of the name (`tokens  # of the prompt`).
A schema of an API document is named for what it is, without the marks of generators and directions (`BudgetIn`).

    python -m tools.check_names

A name or module that starts with an underscore is private. Django finds a management command by the name `Command`.
The types of the generated client have the names of the API's objects, as the server's models have.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.openapi.formatting import read_yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("platform", "tenants", "billing", "frontend", "inference_worker", "kernels", "tools")  # of the product
CHECKED = (*PACKAGES, "benchmarks")
API_DOCUMENTS = ("openapi.yaml", "management-openapi.yaml")  # in docs
GENERATED = ROOT / "platform" / "millrace" / "client" / "models.py"
COMMENTED = ("inference_worker", "kernels")  # packages in which the comments beside names are checked
_HALF_PHRASE = re.compile(r"# (of|as the next)\b|.*, as the next\b")
_SCHEMA = re.compile(r"[A-Z][a-z]+([A-Z][a-z]*|\d+)*")
_VAGUE_SCHEMA = re.compile(r"^(Patched|Paginated)|(Enum|In|Out|From|By|Made|Whole|Serializer)$")


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


def find_problems(paths: Iterable[Path], root: Path) -> list[str]:
    """Return a line for each class name that is used twice and each exception that is not named `exc`."""
    classes: defaultdict[str, list[str]] = defaultdict(list)
    problems = []
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(root)
        for node in public_classes(path, tree):
            classes[node.name].append(f"{name}:{node.lineno}")
        for handler in ast.walk(tree):
            if isinstance(handler, ast.ExceptHandler) and handler.name not in (None, "exc"):
                problems.append(f"{name}:{handler.lineno}: name the exception exc, not {handler.name}")
    for class_name, places in sorted(classes.items()):
        if len(places) > 1:
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
    problems = find_problems(checked_modules(ROOT), ROOT)
    commented = (path for package in COMMENTED for path in sorted((ROOT / package).rglob("*.py")))
    problems += find_comment_problems(commented, ROOT)
    for document in API_DOCUMENTS:
        schemas = read_yaml((ROOT / "docs" / document).read_text(encoding="utf-8"))["components"]["schemas"]
        problems += find_schema_problems(document, schemas)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
