"""The `millrace` command as it can be typed in this installation. Messages that name a command use it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

PROGRAM = "millrace"
_QUOTED = re.compile(r"(?<=`)millrace(?=\s+[a-z])")


def format_command(arguments: str = "") -> str:
    """Return `millrace` with these arguments, as a shell in the current directory finds it.

    After `make up`, the environment is usually not activated: then the result is `.venv/bin/millrace …`.
    """
    return f"{_find_program()} {arguments}".rstrip()


def format_quoted_commands(text: str) -> str:
    """Return the text with each command in backticks as `format_command` returns it."""
    program = _find_program()
    return _QUOTED.sub(lambda _: program, text)


def _find_program() -> str:
    script = Path(sys.executable).with_name(PROGRAM)
    found = shutil.which(PROGRAM)
    if not script.is_file():  # such as with `pip install --user`
        return PROGRAM if found else f"{shlex.quote(sys.executable)} -m millrace.cli"
    if found and os.path.samefile(found, script):
        return PROGRAM
    checkout = script.parents[2]  # directory of .venv/bin/millrace
    return shlex.quote(str(script.relative_to(checkout) if checkout == Path.cwd() else script))
