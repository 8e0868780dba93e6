"""`millrace up`, `config`, `manage` and `completion`: the platform on this machine, and the shell."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from inference_worker.contract.command_line import format_command, format_quoted_commands
from millrace.cli.app import ApiCommand, fail, server_packages

_SHELLS = click.Choice(["bash", "zsh", "fish"])  # bash 4.4 or newer


class _Up(ApiCommand):
    example = "millrace up --port 8001 --data-dir /data/millrace"

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with server_packages():
            from millrace.cli.reference import as_text

            formatter.write(f"\n{as_text()}\n")


class _Config(ApiCommand):
    example = "millrace config --markdown"


class _Manage(ApiCommand):
    example = 'millrace manage create_api_key demo --name "My service" --scope inference'


class _Completion(ApiCommand):
    example = 'eval "$(millrace completion bash)"'


@click.command(cls=_Up)
@click.option("--data-dir", metavar="DIR", help="Directory of all data and logs (MILLRACE_DATA_DIR).")
@click.option("--port", metavar="N", help="Port that the gateway listens on (MILLRACE_PORT).")
@click.option(
    "--model", "models", multiple=True, metavar="SOURCE", help="Serve this model, not MILLRACE_MODELS; repeatable."
)
@click.option("--check", is_flag=True, help="Only run the checks and start nothing.")
def up(data_dir: str | None, port: str | None, models: tuple[str, ...], check: bool) -> None:
    """Start the platform on this machine and stop it on Ctrl-C.

    SOURCE is a model directory, a .gguf file, `embedded`, or organization/name on the Hugging Face hub. A model on the
    hub is pulled first.
    """
    if data_dir:
        os.environ["MILLRACE_DATA_DIR"] = str(Path(data_dir).expanduser().absolute())
    if port:
        os.environ["MILLRACE_PORT"] = port
    with server_packages():
        from inference_worker.checkpoints.model_config import ModelError
        from millrace.cli.up import up as run_platform
        from millrace.local.model_option import as_setting

        if models:
            try:
                os.environ["MILLRACE_MODELS"] = as_setting(models)
            except (ModelError, ValueError) as exc:
                fail(f"--model: {exc}")
        sys.exit(run_platform(check_only=check))


@click.command(cls=_Config)
@click.option("--markdown", is_flag=True, help="Print a table in Markdown.")
def config(markdown: bool) -> None:
    """List all settings."""
    with server_packages():
        from millrace.cli.reference import as_markdown, as_text

        click.echo(as_markdown() if markdown else format_quoted_commands(as_text()))


@click.command(cls=_Manage, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def manage(arguments: tuple[str, ...]) -> None:
    """Run an administration command of the platform. `millrace manage help` lists them."""
    with server_packages():
        from millrace.conf.management import run

        run([format_command("manage"), *arguments])


@click.command(cls=_Completion)
@click.argument("shell", type=_SHELLS)
def completion(shell: str) -> None:
    """Print the script that completes commands and options in a shell."""
    from click.shell_completion import BashComplete, FishComplete, ZshComplete

    from millrace.cli import COMPLETE_VARIABLE, root

    classes = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
    made = classes[shell](root, {}, "millrace", COMPLETE_VARIABLE)
    click.echo(made.source_template % made.source_vars())  # source() would start bash to look at its version
