"""The `millrace` command. Commands are imported when they run, so that the command line starts fast."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from inference_worker.contract.command_line import format_command

COMPLETE_VARIABLE = "_MILLRACE_COMPLETE"  # the variable of a shell that requests completions


class _Entry(NamedTuple):
    """A command: its module, its name there, and its line in the list of commands."""

    module: str
    attribute: str
    help: str


_SECTIONS: dict[str, dict[str, _Entry]] = {
    "Sign in": {
        "login": _Entry("login", "login", "Store the URL and an API key, or an operator's session."),
        "logout": _Entry("login", "logout", "Remove the stored connection, and end an operator's session."),
        "profiles": _Entry("login", "profiles", "List the stored connections."),
    },
    "Tenants": {
        "usage": _Entry("usage", "usage", "Show what was used and what it cost."),
        "budgets": _Entry("budgets", "budgets", "Manage budgets of money, tokens and requests."),
        "limits": _Entry("budgets", "limits", "Manage rate limits."),
        "invoices": _Entry("usage", "invoices", "Show and download invoices."),
        "requests": _Entry("usage", "requests", "Look into the request log."),
        "cache": _Entry("cache", "cache", "Warm the caches, and show what that saved."),
        "listen": _Entry("listen", "listen", "Forward webhook events to a server on this machine."),
        "policies": _Entry("policies", "policies", "Manage routing policies."),
        "router": _Entry("router", "router", "Train the complexity classifier of routing policies."),
        "organization": _Entry("organization", "organization", "Show and change the tenant's settings."),
        "credentials": _Entry("credentials", "credentials", "Manage API keys for upstreams."),
        "audit": _Entry("organization", "audit", "Show the audit log."),
    },
    "Operators": {
        "tenants": _Entry("tenants", "tenants", "Manage tenants, their credit and payments."),
        "prices": _Entry("operators", "prices", "Manage price versions."),
        "costs": _Entry("costs", "costs", "Manage what deployments cost, and show costs of executions."),
        "margin": _Entry("costs", "margin", "Show revenue, cost and margin."),
        "reconcile": _Entry("costs", "reconcile", "Compare a provider's usage export with the booked executions."),
        "billing": _Entry("operators", "billing", "Close billing periods and manage invoices."),
        "deployments": _Entry("deployments", "deployments", "Manage the models that the platform serves."),
        "import": _Entry(
            "litellm_import", "import_group", "Import models, teams, keys and budgets of another gateway."
        ),
        "health": _Entry("operators", "health", "Check whether the platform can serve requests."),
    },
    "This machine": {
        "up": _Entry("platform", "up", "Start the platform until Ctrl-C."),
        "models": _Entry("models", "models", "Pull, inspect and remove models of this machine."),
        "generate": _Entry("offline", "generate", "Generate once with a model, without services."),
        "bench": _Entry("offline", "bench", "Measure a model's tokens per second."),
        "price": _Entry("quotes", "price", "Compute what usage costs, and correct charged prices."),
        "config": _Entry("platform", "config", "List all settings."),
        "manage": _Entry("platform", "manage", "Run an administration command."),
        "completion": _Entry("platform", "completion", "Print the completion script of a shell."),
    },
}


def _sections() -> dict[str, dict[str, str]]:
    """Return the lines of the list of commands, with those of groups that have only plain commands."""
    from millrace.cli.plain_commands import described_groups

    found: dict[str, dict[str, str]] = {}
    for section, entries in _SECTIONS.items():
        lines = found.setdefault(section, {})
        for name, entry in entries.items():
            for group, described in described_groups().items():
                if described.get("before") == name:
                    lines[group] = described.get("line", described["help"])
            lines[name] = entry.help
    return found


class _Root(click.Group):
    """The top of the command line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for lines in _sections().values() for name in lines]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from millrace.cli.plain_commands import add_plain_commands

        entry = next((entries[cmd_name] for entries in _SECTIONS.values() if cmd_name in entries), None)
        module = importlib.import_module(f"millrace.cli.{entry.module}") if entry else None
        return add_plain_commands(cmd_name, getattr(module, entry.attribute) if entry else None)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, lines in _sections().items():
            with formatter.section(section):
                formatter.write_dl(list(lines.items()), col_max=12)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from millrace.cli.app import EXIT_CODES, format_example

        with formatter.section("Example"):
            formatter.write(f"{'':>{formatter.current_indent}}{format_example('millrace login && millrace usage')}\n")
        formatter.write(f"\n{EXIT_CODES}\n")


@click.group(cls=_Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def root() -> None:
    """Run and use Millrace, a multi-tenant managed LLM inference platform."""


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run the command and exit the process."""
    for stream in (sys.stdout, sys.stderr):  # replace characters that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    return root.main(arguments, prog_name=format_command(), complete_var=COMPLETE_VARIABLE)
