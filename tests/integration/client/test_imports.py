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
HTTPX = {"httpx", "httpcore", "anyio", "h11", "certifi", "idna", "typing_extensions", "_typeshed", "exceptiongroup"}
OPTIONAL = {"sniffio", "h2", "socksio", "brotli", "brotlicffi", "zstandard", "backports"}  # httpx tries these


def run(code: str, allowed: set[str]) -> str:
    program = BLOCK.format(allowed=allowed) + code
    path = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(ROOT / 'platform')!r}]\n{program}"]
    return subprocess.run(path, capture_output=True, text=True, check=True, cwd=ROOT / "platform").stdout


def test_client_needs_only_httpx():
    run("from millrace.client import AsyncClient, Client", {"millrace"} | HTTPX | OPTIONAL)
