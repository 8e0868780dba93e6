"""The `millrace` commands that the product prints and that the documentation names."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
from django.core.management import get_commands, load_command_class

from millrace import cli
from millrace.cli.app import ResourceGroup
from tests.support.code_blocks import blocks_of

ROOT = Path(__file__).parents[2]
PRODUCT = [ROOT / name for name in ("billing", "frontend", "inference_worker", "kernels", "platform", "tenants")]
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md")))
    if page.name != "commands.md"  # made from the commands
]
TOP_LEVEL = "|".join(cli.root.list_commands(click.Context(cli.root)))
# Not `millrace up: …`, the prefix of an error, and not the purpose of a key, which ends with a NUL.
FIXED_COMMAND = re.compile(rf"\bmillrace (?:{TOP_LEVEL})\b(?![:\0])|\bmanage\.py\b")
_TEMPLATE_COMMAND = re.compile(r'"([^"]*)"\|command\b')
_INLINE = re.compile(r"`(millrace [a-z][^`]*)`")
_LINE = re.compile(r"(?:^|\$\()(millrace [a-z].*)$", re.MULTILINE)
_HELP = {"help", "example", "help_text", "short_help"}  # keyword arguments of texts that only help contains
_SETTINGS = {"configuration.py", "settings.py"}  # whose texts `format_quoted_commands` prints


def fixed_commands() -> list[str]:
    """Return each string of the product that names a command but does not use `format_command`."""
    found = []
    for path in _files("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        skipped = set(_texts_of_help(tree))
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped
            if is_text and path.name not in _SETTINGS and FIXED_COMMAND.search(str(node.value)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    for path in (*_files("*.html"), *_files("*.txt"), *_files("*.js")):
        if FIXED_COMMAND.search(path.read_text(encoding="utf-8")):
            found.append(str(path.relative_to(ROOT)))
    return found


def _files(pattern: str) -> list[Path]:
    return [path for directory in PRODUCT for path in sorted(directory.rglob(pattern)) if "vendor" not in path.parts]


def _texts_of_help(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the constants of docstrings and of help texts, in which the command line replaces commands itself."""
    for node in ast.walk(tree):
        values: list[ast.AST] = []
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            values = [node.body[0].value] if isinstance(node.body[0], ast.Expr) else []
        elif isinstance(node, ast.Call):
            values = [keyword.value for keyword in node.keywords if keyword.arg in _HELP]
            if getattr(node.func, "id", "") in ("_command", "format_example"):  # the example is an argument
                values += node.args
        elif isinstance(node, ast.Assign):
            names = {getattr(target, "id", "") for target in node.targets}
            values = [node.value] if names & _HELP else []
        for value in values:
            yield from ast.walk(value)


@functools.cache
def printed_commands() -> tuple[str, ...]:
    """Return the arguments of each command that the product prints, up to the first value that is computed."""
    found = []
    for path in _files("*.py"):
        text = path.read_text(encoding="utf-8")
        if "format_command" not in text:  # most files: each process that collects tests would parse all of them
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "format_command" and node.args:
                found.append(_fixed_part(node.args[0]))
    for path in _files("*.html"):
        found += _TEMPLATE_COMMAND.findall(path.read_text(encoding="utf-8"))
    return tuple(sorted({text for text in found if text}))


def command_words(arguments: str) -> str:
    """Return the names of the command at the beginning of its arguments."""
    return " ".join(itertools.takewhile(re.compile("[a-z][a-z_-]*$").match, arguments.split()))


def _fixed_part(argument: ast.expr) -> str:
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    fixed = parts[0].value if parts and isinstance(parts[0], ast.Constant) else ""
    return str(fixed).strip()


def documented_commands() -> list[tuple[str, str]]:
    """Return each page with a command that it names, in blocks of code and in the text."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = "\n".join(block.code.replace("\\\n", " ") for block in blocks_of(text))
        lines = [line.partition("  #")[0] for line in _LINE.findall(code)]
        for command in (*lines, *_INLINE.findall(text)):
            found[str(page.relative_to(ROOT)), command.strip()] = None
    return list(found)


def check_command(text: str) -> str | None:
    """Return what is wrong with a command line: an unknown command or option. Values are not checked."""
    words = _words_of(text)[1:]
    command: click.Command = cli.root
    context = click.Context(cli.root)
    while words and isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        if found is None:
            if not isinstance(command, ResourceGroup) or not words[0].startswith("-"):
                return f"{words[0]!r} is no command"
            found = command.get_command(context, command.default)  # the default may be omitted
            assert found is not None
        else:
            words = words[1:]
        command = found
    if command.name == "manage":
        return _check_administration_command(words)
    if isinstance(command, ResourceGroup) and (default := command.get_command(context, command.default)):
        command = default
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in _options_of(words) if word not in known | {"-h", "--help"}]
    return f"unknown options {unknown}" if unknown else None


def _check_administration_command(words: list[str]) -> str | None:
    if not words or words[0] in ("help", "…"):
        return None
    if words[0] not in get_commands():
        return f"{words[0]!r} is no administration command"
    app = get_commands()[words[0]]
    command = load_command_class(app, words[0]) if isinstance(app, str) else app
    parsers = [command.create_parser("millrace manage", words[0])]
    known: set[str] = set()
    while parsers:
        parser = parsers.pop()
        known |= set(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action.choices, dict):  # subcommands
                parsers += list(action.choices.values())
    unknown = [word for word in _options_of(words) if word not in known]
    return f"unknown options {unknown}" if unknown else None


def _words_of(text: str) -> list[str]:
    """Return the words of the first command of a line."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|;&()<>")
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for word in lexer:
            if set(word) <= set("|;&()<>"):
                break
            words.append(word)
    except ValueError:  # a quotation that the page cuts
        pass
    return words


def _options_of(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
