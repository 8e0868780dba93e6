"""The `millrace` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from millrace.cli.reference import as_markdown, as_text, replace_table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exits with status 0, 1 (failure) or 2 (wrong usage)."""
    for stream in (sys.stdout, sys.stderr):  # replace characters that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    options = _parser().parse_args(arguments)
    if options.command == "config":
        if options.write:
            document = Path(options.write)
            document.write_text(replace_table(document.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            print(as_markdown() if options.markdown else as_text())
        return
    if options.data_dir:
        os.environ["MILLRACE_DATA_DIR"] = str(Path(options.data_dir).expanduser().absolute())
    if options.port:
        os.environ["MILLRACE_PORT"] = options.port
    from millrace.cli.up import up  # imported here, so that --help is fast

    sys.exit(up(check_only=options.check))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="millrace", description="A multi-tenant managed LLM inference platform.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser(
        "up",
        help="start the platform on this machine until Ctrl-C",
        description="Start the platform on this machine and stop it on Ctrl-C.",
        epilog=as_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    up.add_argument("--data-dir", metavar="DIR", help="directory of all data and logs (MILLRACE_DATA_DIR)")
    up.add_argument("--port", metavar="N", help="port that the gateway listens on (MILLRACE_PORT)")
    up.add_argument("--check", action="store_true", help="only run the checks and start nothing")
    config = commands.add_parser("config", help="list all settings", description="List all settings.")
    config.add_argument("--markdown", action="store_true", help="print the table of docs/reference/configuration.md")
    config.add_argument("--write", metavar="FILE", help="replace the table between its marks in this document")
    return parser
