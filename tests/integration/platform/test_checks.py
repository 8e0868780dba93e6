"""The checks in tools/: each detects a violation."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools import check_commits, check_names, check_words
from tools.openapi import changes

WORDS = check_words.WordList(
    spelling={"plowgh": "plow"}, identifiers={"errand": "request"}, texts={"goes on": "continues", "anew": "again"}
)


FUNCTIONS = check_names.FunctionNames(
    avoid=frozenset({"left", "spent", "done"}),
    verbs=frozenset({"embed"}),
    exceptions=frozenset({"a.done"}),
)


@pytest.mark.parametrize(
    ("subject", "is_valid"),
    [
        ("gateway: return the memory of large bodies", True),
        ("billing, console: write CSV with one writer", True),
        ("Mend what a stranger found", False),
        ("Gateway: return memory", False),
        ("gateway:return memory", False),
        ("gateway: return memory.", False),
        (f"gateway: {'x' * 63}", True),
        (f"gateway: {'x' * 64}", False),
    ],
)
def test_commit_subjects(subject: str, is_valid: bool) -> None:
    assert (check_commits.find_problems([("abc", subject)]) == []) is is_valid


def _git(root: Path, *arguments: str) -> str:
    options = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(root), *options, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_commits_are_read_after_the_start_commit(tmp_path: Path) -> None:
    assert check_commits.read_commits(tmp_path, "HEAD") == []  # not a repository
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "An exempt subject")
    start = _git(tmp_path, "rev-parse", "HEAD")
    _git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "tests: add a check\n\nA body.")
    assert [subject for _, subject in check_commits.read_commits(tmp_path, start)] == ["tests: add a check"]
    assert check_commits.read_commits(tmp_path, "0" * 40) == []  # a shallow checkout


def test_documents_are_read_from_the_commit_at_which_the_branch_left(tmp_path: Path) -> None:
    assert changes.base_commit(tmp_path) is None  # not a repository
    _git(tmp_path, "init", "--quiet", "--initial-branch=main")
    (tmp_path / "a.yaml").write_text("info: {version: 1}\n")
    _git(tmp_path, "add", "a.yaml")
    _git(tmp_path, "commit", "--quiet", "-m", "one")
    _git(tmp_path, "checkout", "--quiet", "-b", "branch")
    (tmp_path / "a.yaml").write_text("info: {version: 2}\n")
    _git(tmp_path, "commit", "--quiet", "-am", "two")
    base = changes.base_commit(tmp_path)
    assert base is not None
    assert changes.read_document(tmp_path, base, "a.yaml") == {"info": {"version": 1}}
    assert changes.read_document(tmp_path, base, "b.yaml") == {}  # it did not exist


def test_class_names_are_unique(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Limit: ...\nclass _Row: ...\n")
    (tmp_path / "b.py").write_text("class _Row: ...\nif True:\n    class Limit: ...\n")
    (tmp_path / "_c.py").write_text("class Limit: ...\n")
    commands = tmp_path / "management" / "commands"
    commands.mkdir(parents=True)
    for name in ("one.py", "two.py"):
        (commands / name).write_text("class Command: ...\n")
    paths = sorted(tmp_path.rglob("*.py"))
    assert check_names.find_problems(paths, tmp_path, FUNCTIONS) == ["b.py:3: class Limit is also defined at a.py:1"]


def test_classes_of_different_screens_may_have_the_same_name(tmp_path: Path) -> None:
    screens = tmp_path / "frontend" / "tenant"
    for screen in ("keys", "usage"):
        (screens / screen).mkdir(parents=True)
        (screens / screen / "page.py").write_text("class Row: ...\n")
    assert check_names.find_problems(sorted(tmp_path.rglob("*.py")), tmp_path, FUNCTIONS) == []
    (screens / "usage" / "views.py").write_text("class Row: ...\n")
    (problem,) = check_names.find_problems(sorted(tmp_path.rglob("*.py")), tmp_path, FUNCTIONS)
    assert problem.startswith("frontend/tenant/usage/views.py:1: class Row is also defined at")


def test_functions_are_named_by_verbs(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "def _left(): ...\ndef embed(): ...\ndef served_model(): ...\ndef done(): ...\nclass Budget:\n"
        "    def spent(self): ...\n    @property\n    def used(self): ...\n"
        "    async def add(self):\n        if self:\n            def added(): ...\n"
    )
    problems = check_names.find_problems([path], tmp_path, FUNCTIONS)
    assert [problem.split()[4] for problem in problems] == ["_left", "spent", "added"]


def test_schemas_are_named_for_what_they_are() -> None:
    names = [
        "Budget",
        "BudgetIn",
        "BudgetOut",
        "StateEnum",
        "PatchedBudget",
        "Checkout",
        "Domain",
        "budget",
        "Budget_2",
    ]
    problems = check_names.find_schema_problems("openapi.yaml", names)
    assert [problem.split()[4] for problem in problems] == [*names[1:5], *names[7:]]


def test_comments_beside_names_are_noun_phrases(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "class Prompt:\n"
        "    size: int  # of the prompt\n"
        "    tokens: int = 0  # tokens of the prompt\n"
        "    blocks = [\n"
        "        1,  # the first one, as the next two\n"
        "    ]\n"
        "    # of nothing\n"
        "    def size_of(self): ...  # of a call\n"
        "    scale: float  # by which blocks are multiplied\n"
    )
    problems = check_names.find_comment_problems([path], tmp_path)
    assert [problem.split(": ")[0] for problem in problems] == ["a.py:2", "a.py:5", "a.py:9"]


def test_exceptions_are_named_exc(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("try: ...\nexcept OSError as exc: ...\nexcept ValueError as fault: ...\n")
    assert check_names.find_problems([path], tmp_path, FUNCTIONS) == ["a.py:3: name the exception exc, not fault"]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", 'class LastErrand: ...\n"""Goes on\nanew."""\n', ["LastErrand", "Goes on", "anew"]),
        ("a.py", "x = 1  # it goes on\nerrands = f'{x} anew'\n", ["goes on", "anew"]),
        ("a.py", "anew = goes_on = 1\n", []),
        ("a.md", "It goes\non, in every plowgh.\n", ["goes on", "plowgh"]),
        ("openapi.yaml", "Errand:\n  x: {last_errand: null, description: An errand.}\n", ["Errand", "last_errand"]),
        ("a.html", "<p>{{ errand.plowgh }} renewed</p>", ["plowgh", "errand"]),
    ],
)
def test_words(name: str, text: str, found: list[str]) -> None:
    problems = check_words.find_problems(Path(name), text, WORDS, product=True)
    assert sorted(word for _, word, _ in problems) == sorted(found)


def test_identifiers_and_strings_of_tests_are_checked_only_for_spelling() -> None:
    problems = check_words.find_problems(Path("a.py"), "errand = 'anew'  # a Plowgh\n", WORDS, product=False)
    assert problems == [(1, "Plowgh", "plow")]


def test_docstrings_and_comments_of_tests_are_checked_for_words() -> None:
    text = '"""It goes on."""\n\ndef errand():\n    """Anew."""\n    x = "anew"  # goes on\n'
    problems = check_words.find_problems(Path("a.py"), text, WORDS, product=False)
    assert [(line, word) for line, word, _ in problems] == [(1, "goes on"), (4, "Anew"), (5, "goes on")]


def test_the_glossary_names_code_that_exists() -> None:
    text = (check_names.ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    text, _, acts = text.partition("## Acts in the console")
    assert acts  # a table without code
    places = re.findall(r"\| `([\w/]+\.py)` `(\w+)` \|", text)
    assert len(places) == sum(line.startswith("| ") for line in text.splitlines()) - 5  # minus a header for each table
    missing = [
        f"{path}: {name}"
        for path, name in places
        if not (check_names.ROOT / path).exists()
        or not re.search(
            rf"^(?:(?:async )?def |class )?{name}\b", (check_names.ROOT / path).read_text(encoding="utf-8"), re.M
        )
    ]
    assert missing == []
