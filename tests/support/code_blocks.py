"""Code blocks of the documentation: what runs in a test, and what needs something that tests do not have.

The info string of a block in one of LANGUAGES is `python runnable`, or `python needs="a GPU"`. A block `text output`
after a runnable block is its expected output; `…` in it matches any text.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LANGUAGES = ("sh", "python", "js")
BLOCK_SECONDS = 300  # long enough for a slow machine
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]+)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CodeBlock:
    """A code block of a page."""

    line: int
    language: str
    marks: str  # the rest of the info string
    code: str

    @property
    def is_runnable(self) -> bool:
        return self.marks == "runnable"

    @property
    def is_output(self) -> bool:
        return (self.language, self.marks) == ("text", "output")

    @property
    def names_needs(self) -> bool:
        return bool(re.fullmatch(r'needs="[^"]+"', self.marks))


def blocks_of(text: str) -> list[CodeBlock]:
    """Return the code blocks of a page."""
    found = []
    for match in _FENCE.finditer(text):
        language, _, marks = match["info"].partition(" ")
        found.append(CodeBlock(text.count("\n", 0, match.start()) + 1, language, marks.strip(), match["code"]))
    return found


def matches(expected: str, output: str) -> bool:
    """Return whether the output is as expected. `…` matches any text."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return bool(re.fullmatch(pattern, output.strip(), re.DOTALL))


@dataclass
class Session:
    """The state of a page's blocks, which run one after the other: environment, directory and Python names."""

    directory: Path
    environment: dict[str, str]
    replacements: Mapping[str, str]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def run(self, block: CodeBlock) -> str:
        """Run a block and return what it printed. Raises an error if the block fails."""
        code = block.code
        for old, new in self.replacements.items():
            code = code.replace(old, new)
        return self._run_python(code, block) if block.language == "python" else self._run_shell(code)

    def _run_python(self, code: str, block: CodeBlock) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.chdir(self.directory):
            exec(compile("\n" * block.line + code, "<page>", "exec"), self.names)  # noqa: S102
        return printed.getvalue()

    def _run_shell(self, code: str) -> str:
        after = self.directory / "environment-after"
        script = f"set -euo pipefail\n{code}\nenv -0 >{after}\n"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=BLOCK_SECONDS,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        pairs = (pair.partition("=") for pair in after.read_text().split("\0") if pair)
        self.environment = {name: value for name, _, value in pairs}
        os.environ.update({name: value for name, value in self.environment.items() if name.startswith("MILLRACE_")})
        return done.stdout


def replacements_for(url: str) -> dict[str, str]:
    """Return what to replace in blocks, so that they use the platform at this URL."""
    return {
        "http://127.0.0.1:8000": url,
        ".venv/bin/": f"{Path(sys.executable).parent}/",
    }


def run_blocks(page: Path, session: Session) -> None:
    """Run the runnable blocks of a page in order, and compare their outputs with the expected ones."""
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.is_runnable:
            output = session.run(block)
            if following is not None and following.is_output:
                assert matches(following.code, output), f"line {following.line}: {output}"
