"""Check of commit subjects: `area: summary`, at most 72 characters.

    python -m tools.check_commits

Commits up to `START` are exempt. Without git, or in a checkout that lacks `START`, nothing is checked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START = "060dbbc37606186fbd2c347d777a7f7f2fa33dd1"  # the newest commit that is exempt
MAX_SUBJECT_LENGTH = 72

_SUBJECT = re.compile(r"[a-z0-9][a-z0-9_./-]*(, [a-z0-9][a-z0-9_./-]*)*: \S.*")


def find_problems(commits: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each (commit, subject) that breaks a rule."""
    problems = []
    for commit, subject in commits:
        if not _SUBJECT.fullmatch(subject):
            problems.append(f"{commit}: write the subject as `area: summary`: {subject}")
        elif len(subject) > MAX_SUBJECT_LENGTH:
            problems.append(f"{commit}: shorten the subject to {MAX_SUBJECT_LENGTH} characters: {subject}")
        elif subject.endswith("."):
            problems.append(f"{commit}: end the subject without a period: {subject}")
    return problems


def read_commits(root: Path, start: str = START) -> list[tuple[str, str]]:
    """Return the abbreviated hash and the subject of each commit after `start`; none if git cannot list them."""
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return []
    command = [git, "-C", str(root), "log", "--no-merges", "--format=%h %s", f"{start}..HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:  # a shallow checkout
        return []
    return [(commit, subject) for commit, _, subject in (line.partition(" ") for line in result.stdout.splitlines())]


def main() -> int:
    """Print the problems; return 1 if there are any."""
    problems = find_problems(read_commits(ROOT))
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
