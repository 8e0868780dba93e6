"""Printed commands in a new shell of a checkout, in which the environment is not activated."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inference_worker.contract.command_line import format_command
from tests.support.printed_commands import command_words, printed_commands

ROOT = Path(__file__).resolve().parents[3]
PATH = "/usr/bin:/bin"
SETTINGS = """\
MILLRACE_DATABASE_URL=postgresql://nobody@127.0.0.1:1/none
MILLRACE_VALKEY_URL=redis://127.0.0.1:1/0
MILLRACE_SECRET_KEY=00000000000000000000000000000000
MILLRACE_PREFIX_CACHE_SECRET=00000000000000000000000000000000
MILLRACE_KEY_PEPPERS=00000000000000000000000000000000
MILLRACE_WORKER_SECRET=00000000000000000000000000000000
"""


@pytest.fixture(autouse=True)
def _outside_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.chdir(ROOT)


def run_in_fresh_shell(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell without the variables of this one, after a first start of the platform."""
    (home / "env").write_text(SETTINGS, encoding="utf-8")
    (home / "env").chmod(0o600)
    environ = {"PATH": PATH, "HOME": str(home), "MILLRACE_DATA_DIR": str(home)}
    return subprocess.run(["sh", "-c", command], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", sorted({command_words(arguments) for arguments in printed_commands()}))
def test_a_printed_command_runs(words: str, tmp_path: Path) -> None:
    assert shutil.which("millrace") is None
    said = run_in_fresh_shell(f"{format_command(words)} --help", tmp_path)
    assert said.returncode == 0, said.stderr
    assert "sage" in said.stdout or "subcommand" in said.stdout


def test_an_administration_command_runs(tmp_path: Path) -> None:
    said = run_in_fresh_shell(f"{format_command('manage')} help", tmp_path)
    assert f"Type '{format_command('manage')} help <subcommand>'" in said.stdout, said.stderr


def test_manage_py_runs_on_the_python_of_the_system(tmp_path: Path) -> None:
    said = run_in_fresh_shell("./manage.py help", tmp_path)
    assert "generate_invoices" in said.stdout, said.stderr


def test_an_error_names_a_command_that_runs(tmp_path: Path) -> None:
    said = run_in_fresh_shell(f"{format_command('usage')}", tmp_path)
    assert f"Run `{format_command('login')}`" in said.stderr
    said = run_in_fresh_shell(f"{format_command('keys lits')}", tmp_path)
    assert f"Try '{format_command('keys')} --help'" in said.stderr


def test_the_shell_completes_the_path_of_the_command(tmp_path: Path) -> None:
    words = "_MILLRACE_COMPLETE=bash_complete COMP_WORDS='millrace key' COMP_CWORD=1"
    assert run_in_fresh_shell(f"{words} {format_command()}", tmp_path).stdout == "plain,keys\n"


def test_the_documented_activation_puts_the_command_on_the_path(tmp_path: Path) -> None:
    activate = Path(sys.prefix) / "bin" / "activate"
    said = run_in_fresh_shell(f". {activate} && millrace login --help && python -m benchmarks.serve --help", tmp_path)
    assert said.returncode == 0, said.stderr
    assert "Usage: millrace login" in said.stdout
