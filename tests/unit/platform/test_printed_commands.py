"""Commands that the product prints can be typed as they are printed, and those of the documentation exist."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from inference_worker.contract import command_line
from inference_worker.contract.command_line import format_command, format_quoted_commands
from millrace import cli
from tests.support import printed_commands


def test_each_printed_command_is_one_that_can_be_typed() -> None:
    assert printed_commands.fixed_commands() == []


@pytest.mark.parametrize("arguments", printed_commands.printed_commands())
def test_a_printed_command_exists(arguments: str) -> None:
    assert printed_commands.check_command(f"millrace {arguments}") is None


def test_each_documented_command_exists() -> None:
    documented = printed_commands.documented_commands()
    assert len(documented) > 100
    wrong = [
        f"{page}: {text}: {problem}" for page, text in documented if (problem := printed_commands.check_command(text))
    ]
    assert wrong == []


def test_the_documentation_uses_one_command() -> None:
    named = [str(page) for page in printed_commands.PAGES if "manage.py" in page.read_text(encoding="utf-8")]
    assert named == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("millrace deployments show llama", None),
        ("millrace usage --by model", None),
        ("millrace manage price_book import a.csv --note x", None),
        ("X=1 millrace", "'millrace' is no command"),
        ("millrace deployment list", "'deployment' is no command"),
        ("millrace deployments list --jsonl", "unknown options ['--jsonl']"),
        ("millrace manage price_books", "'price_books' is no administration command"),
        ("millrace manage price_book import a.csv --notes x", "unknown options ['--notes']"),
        ("millrace policies list | grep --nothing", None),
    ],
)
def test_a_wrong_command_is_found(text: str, problem: str | None) -> None:
    assert printed_commands.check_command(text) == problem


# The form of a command


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of scripts of an installation whose command is not on the PATH."""
    directory = tmp_path / "checkout" / ".venv" / "bin"
    directory.mkdir(parents=True)
    (directory / "millrace").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(directory / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return directory


def test_in_a_checkout_a_command_begins_with_the_path_of_the_environment(
    scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "checkout")
    assert format_command("login") == ".venv/bin/millrace login"
    assert format_command() == ".venv/bin/millrace"


def test_in_another_directory_the_path_is_absolute(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in (Path("/"), scripts, scripts.parents[2]):
        monkeypatch.chdir(directory)
        assert format_command("login") == f"{scripts}/millrace login"


def test_on_the_path_a_command_has_only_its_name(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{scripts}:/usr/bin")
    assert format_command("login") == "millrace login"


def test_the_command_of_another_installation_is_not_used(
    scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "millrace").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/other:{scripts}")
    assert format_command("login") == f"{scripts}/millrace login"


def test_a_path_with_a_space_is_quoted(scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "my checkout" / ".venv" / "bin"
    shutil.copytree(scripts, directory)
    monkeypatch.setattr(sys, "executable", str(directory / "python"))
    assert format_command("login") == f"'{directory}/millrace' login"


def test_without_a_script_python_runs_the_module(scripts: Path) -> None:
    (scripts / "millrace").unlink()
    assert format_command("login") == f"{sys.executable} -m millrace.cli login"


# Help


def commands_of(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        found += commands_of(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
    return found


def test_help_names_commands_as_they_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_find_program", lambda: "bin/millrace")
    paths = [path for path in commands_of(cli.root) if path != ("manage",)]  # Django's help
    assert len(paths) > 100
    for path in paths:
        said = CliRunner().invoke(cli.root, [*path, "--help"], prog_name=format_command())
        assert said.exit_code == 0
        fixed = re.sub(r"bin/millrace\b", "", said.output)
        assert not printed_commands.FIXED_COMMAND.search(fixed), said.output
        if len(path) > 0:
            assert "bin/millrace " in said.output.partition("Example")[2]


def test_commands_in_a_text_are_replaced_only_in_quotation_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_find_program", lambda: "bin/millrace")
    assert format_quoted_commands("millrace loads it: `millrace up`") == "millrace loads it: `bin/millrace up`"
