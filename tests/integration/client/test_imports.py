"""The client and the command line work where only their own dependencies are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BLOCK = """
import importlib.abc, sys
ALLOWED = {allowed!r}
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ALLOWED | sys.stdlib_module_names:
            return None
        raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Block())
"""
HTTPX = {
    "httpx2",
    "httpcore2",
    "anyio",
    "h11",
    "truststore",
    "idna",
    "typing_extensions",
    "_typeshed",
    "exceptiongroup",
}
COMMAND_LINE = {"millrace", "click", "inference_worker"}  # the last for its module of printed commands only
OPTIONAL = {"sniffio", "h2", "socksio", "brotli", "brotlicffi", "zstandard", "backports"}  # httpx2 tries these


def run(code: str, allowed: set[str]) -> str:
    program = BLOCK.format(allowed=allowed) + code
    path = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(ROOT / 'platform')!r}]\n{program}"]
    return subprocess.run(path, capture_output=True, text=True, check=True, cwd=ROOT / "platform").stdout


def test_client_needs_only_httpx():
    run("from millrace.client import AsyncClient, Client", {"millrace"} | HTTPX | OPTIONAL)


def test_command_line_needs_only_its_own_dependencies():
    allowed = {"rich", "markdown_it", "mdurl", "pygments", "colorama"} | COMMAND_LINE | HTTPX | OPTIONAL
    said = run(
        """
import importlib, os
from millrace import cli
for section in cli._SECTIONS.values():
    for entry in section.values():
        getattr(importlib.import_module(f"millrace.cli.{entry.module}"), entry.attribute)
from millrace.cli import output
output.print_table([{"a": 1}], [output.Column("a", "a")], "")
try:
    cli.main(["config"])
except SystemExit as exc:
    print("status", exc.code)
""",
        allowed,
    )
    assert said.endswith("status 1\n")


def test_help_loads_no_command():
    loaded = run(
        """
from millrace import cli
try:
    cli.main(["--help"])
except SystemExit:
    print(sorted(name for name in sys.modules if name.partition(".")[0] in ("httpx2", "rich", "django", "msgspec")))
    print(sorted(name for name in sys.modules if name.startswith("inference_worker")))
""",
        COMMAND_LINE,
    )
    modules = ["inference_worker", "inference_worker.contract", "inference_worker.contract.command_line"]
    assert loaded.endswith(f"[]\n{modules}\n")
