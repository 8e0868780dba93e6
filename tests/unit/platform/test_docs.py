"""References in the docs: links, the site's navigation, paths of pages in the code, and the tests that pages name."""

from __future__ import annotations

import ast
import itertools
import os
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.support.code_blocks import LANGUAGES, blocks_of, matches
from tools.check_words import PRODUCT, SUPPORT

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
NAMED = re.compile(r"`(?:tests/)?([\w/]+/test_\w+\.py)(?:::(\w+))?`")  # from the root, or from tests/
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2$", re.MULTILINE | re.DOTALL)
CHECKED = (*PRODUCT, *SUPPORT, "tools", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "pyproject.toml", ".github")
SUFFIXES = {".py", ".md", ".toml", ".html", ".yaml", ".yml", ""}


@cache
def functions_of(path: Path) -> set[str]:
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, functions)}


@cache
def anchors_of(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        repeated = sum(bool(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other)) for other in anchors)
        anchors.add(f"{anchor}-{repeated}" if repeated else anchor)
    return anchors


def pages_of(entry: object) -> list[str]:
    """Return the pages below an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = list(entry.values()) if isinstance(entry, dict) else entry
    assert isinstance(parts, list)
    return [page for part in parts for page in pages_of(part)]


def navigation_tabs() -> dict[str, list[str]]:
    """Return the tabs of the site, each with its pages in order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return {name: pages_of(part) for tab in yaml.safe_load(text)["nav"] for name, part in tab.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    wrong = []
    for path, anchor in LINK.findall(text):
        target = Path(os.path.normpath(page.parent / path)) if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            wrong.append(f"{path}#{anchor}" if anchor else path)
        elif DOCS in page.parents and DOCS not in target.parents:
            wrong.append(f"{path}: outside of docs/, which the site cannot link to")
    assert wrong == []


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    navigation = [page for pages in navigation_tabs().values() for page in pages]
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    records = {page for page in pages if re.match(r"explanation/adr/\d", page)}  # tools/site_hooks.py adds them
    assert sorted(navigation) == sorted(pages - records)


def test_the_navigation_has_a_tab_for_each_reader() -> None:
    tabs = ["Start", "Use the API", "Run it", "Bill it", "Reference", "How it works", "Contribute"]
    assert list(navigation_tabs()) == tabs


def test_the_documentation_map_equals_the_navigation() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| \[[^\]]+\]\(([^)#]+\.md)\) \|", re.MULTILINE)
    sections = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    mapped = {name: row.findall(section) for name, section in sections if row.search(section)}
    tabs = {name: [page for page in pages if page != "index.md"] for name, pages in navigation_tabs().items()}
    assert list(mapped) == list(tabs)
    assert mapped == tabs


def test_every_page_named_in_a_file_exists() -> None:
    starts = [ROOT / name for name in CHECKED]
    found = (path for start in starts for path in ([start] if start.is_file() else start.rglob("*")))
    files = [path for path in found if path.is_file() and path.suffix in SUFFIXES and "data" not in path.parts]
    named = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|svg|yaml|webp)")
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in named.findall(file.read_text(encoding="utf-8", errors="replace"))
        if not (ROOT / name).exists()
    ]
    assert missing == []


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
    text = (DOCS / "explanation" / "reliability.md").read_text(encoding="utf-8")
    table = text.split("|---|---|---|\n", 1)[1].split("\n\n", 1)[0].splitlines()
    assert len(table) > 20
    assert [row for row in table if not NAMED.search(row.rsplit("|", 2)[1])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_block_is_runnable_or_names_what_it_needs(page: Path) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    unmarked = [b.line for b in blocks if b.language in LANGUAGES and not (b.is_runnable or b.names_needs)]
    misplaced = [
        after.line for before, after in itertools.pairwise(blocks) if after.is_output and not before.is_runnable
    ]
    assert (unmarked, misplaced) == ([], [])


def test_an_ellipsis_in_expected_output_matches_any_text() -> None:
    assert matches("a … c\n", "a b\nb c")
    assert not matches("a … c", "a b d")
