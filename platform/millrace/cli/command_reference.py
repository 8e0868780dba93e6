"""The reference of all commands as Markdown, generated from the commands when the documentation site is built."""

from __future__ import annotations

from collections.abc import Iterator

import click

from millrace.cli import root
from millrace.cli.app import EXIT_CODES


def commands_as_markdown() -> str:
    """Return the exit codes, and each command's arguments, options and example."""
    codes = EXIT_CODES.replace("\n", " ")
    lines = [f"{codes[0].upper()}{codes[1:]}.", ""]
    for name, command in _commands(root, "millrace"):
        lines += _section(name, command)
    return "\n".join(lines).rstrip() + "\n"


def _commands(group: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if command is None:
            continue
        yield f"{prefix} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix} {name}")


def _section(name: str, command: click.Command) -> list[str]:
    level = "#" * name.count(" ")
    lines = [f"#{level} {name}", "", _escape_cell(" ".join((command.help or "").split())), ""]
    if isinstance(command, click.Group):
        return lines
    # A command keeps the names of its help option from its first context.
    pieces = command.collect_usage_pieces(click.Context(command, **root.context_settings))
    lines += ["```text", " ".join([name, *pieces]), getattr(command, "example", ""), "```", ""]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    if options:
        lines += ["| option | description |", "|---|---|"]
        lines += [f"| `{_option_title(option)}` | {_escape_cell(option.help or '')} |" for option in options]
        lines.append("")
    return lines


def _option_title(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    choices = getattr(option.type, "choices", ())
    return f"{names} {option.metavar or '/'.join(map(str, choices)) or 'VALUE'}"


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
