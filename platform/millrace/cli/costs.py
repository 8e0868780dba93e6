"""`millrace costs`, `margin` and `reconcile`: the costs of operators, and the revenue from tenants."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from inference_worker.contract.command_line import format_command
from millrace.cli import output
from millrace.cli.app import ResourceGroup, Session, api_command, command, fail, given_options
from millrace.cli.output import Column, number, price_columns, usd, yes_no
from millrace.cli.plain_commands import columns_of

MAX_FILE_BYTES = 8_000_000
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_MODELS = click.option(
    "--model", "models", multiple=True, metavar="DEPLOYMENT=NAME", help="The model's name in the file; repeat."
)
_CHANGE = [
    Column("deployment", "model"),
    Column("component", "component"),
    Column("from tokens", "from_tokens", number, right=True),
    Column("now", lambda row: row["before_usd_per_million"] or "–", right=True),
    Column("new", lambda row: row["after_usd_per_million"] or "–", right=True),
]
_AMOUNTS = [
    Column("executions", "executions", number, right=True),
    Column("revenue", "revenue_usd", usd, right=True),
    Column("cost", "cost_usd", usd, right=True),
    Column("margin", "margin_usd", usd, right=True),
    Column("not billed", "unbilled_usd", usd, right=True),
]
_MARGIN = [Column("month", "month"), Column("tenant", "tenant"), Column("deployment", "model"), *_AMOUNTS]


def _tokens(name: str) -> Any:
    def of(row: Mapping[str, Any]) -> str:
        counted = row[name]
        return "–" if counted is None else f"{counted['input_tokens']:,} + {counted['output_tokens']:,}"

    return of


_DIFFERENCE = [
    Column("day", "day"),
    Column("model", "model"),
    Column("request", lambda row: row["request_id"] or "all"),
    Column("provider", _tokens("provider"), right=True),
    Column("booked", _tokens("booked"), right=True),
    Column("provider's cost", lambda row: (row["provider"] or {}).get("cost_usd") or "–", right=True),
    Column("booked cost", lambda row: (row["booked"] or {}).get("cost_usd") or "–", right=True),
    Column("credit", "credit_usd", right=True),
    Column("credited", "is_credited", yes_no),
]


@click.group(cls=ResourceGroup)
def costs() -> None:
    """Manage what deployments cost the operator, and show costs of executions (operators)."""


@command(costs, "show", example="millrace costs show gpt-4o-mini")
@click.argument("deployment")
def show_costs(session: Session, deployment: str) -> None:
    """Show the costs of a deployment, per million tokens."""
    cards = [card for card in session.client.operator.costs.list() if card["model"] == deployment]
    if not cards:
        fail(f"the deployment {deployment!r} has no cost card; import one with `{format_command('costs import')}`")
    if session.as_json:
        output.print_json(cards[0])
        return
    output.print_fields(cards[0], columns_of("costs", "list"))
    click.echo()
    output.print_table(cards[0]["prices"], price_columns(usd), "No prices.")


@command(costs, "import", example="millrace costs import prices.json --model fast=gpt-4o-mini --dry-run")
@click.argument("file", type=_FILE)
@_MODELS
@click.option("--effective-from", metavar="TIME", help="Not in the past; default: now.")
@click.option("--round", is_flag=True, default=None, help="Round costs that are not whole nano-USD per million tokens.")
@click.option("--note", help="Where the costs are from.")
@click.option("--dry-run", is_flag=True, help="Only print the changes.")
def import_costs(session: Session, file: Path, models: Sequence[str], dry_run: bool, **fields: Any) -> None:
    """Set the costs of deployments from the public JSON price file, which may be gzipped, or a CSV.

    Without --model, all models of a CSV are imported, and of the public file those of the catalog's deployments: a
    deployment's model at its upstream, or else a model with the deployment's name.
    """
    content = _read(file)
    kind: Any = "csv" if ".csv" in file.suffixes else "json"
    names = _names(models)
    if not names and kind == "json":
        names = _catalog_names(session.client.operator.deployments.list(), content, file)
    if names:
        fields["models"] = names
    found = session.client.operator.costs.import_file(
        file_type=kind, content=content, dry_run=dry_run, **given_options(fields)
    )
    if session.as_json:
        output.print_json(found)
        return
    output.print_table(found["changes"], _CHANGE, "No changes.")
    if found["changes"]:
        deployments = len({change["model"] for change in found["changes"]})
        verb = "Would set" if dry_run else "Set"
        click.echo(f"{verb} the costs of {deployments} deployments, in USD per million tokens.", err=True)


_MARGIN_OPTIONS = (
    click.option("--from", "from_month", metavar="MONTH", help="First month, such as 2026-11; default: this month."),
    click.option("--to", "to_month", metavar="MONTH", help="Last month; default: the first."),
    click.option("--model", metavar="DEPLOYMENT", help="Only this deployment."),
    click.option("--tenant", "tenant_id", type=int, metavar="ID", help="Only this tenant."),
    click.option("--group-by", metavar="GROUPS", help="Comma-separated: month, tenant, model; default: all of them."),
    click.option("--all", is_flag=True, default=None, help="Also deployments without a booked cost."),
)


def _show_margin(session: Session, **filters: Any) -> None:
    """Show revenue, cost and margin by month, tenant and deployment (operators)."""
    found = session.client.operator.margins.get(**given_options(filters))
    if session.as_json:
        output.print_json(found)
    else:
        output.print_table([*found["rows"], found["total"]], _MARGIN, "")
        click.echo("The last row is the total.", err=True)


def _with_options(function: Any, options: Sequence[Any]) -> Any:
    for option in reversed(options):
        function = option(function)
    return function


margin = api_command(
    "margin",
    _with_options(_show_margin, _MARGIN_OPTIONS),
    example="millrace margin --from 2026-10 --to 2026-11 --group-by month,model",
)


def _reconcile(session: Session, file: Path, models: Sequence[str], apply: bool) -> None:
    """Compare a provider's usage export with the booked executions (operators).

    FILE is a CSV with the columns day, model, input_tokens and output_tokens, and optionally cached_tokens, cost_usd
    and request_id. --apply credits requests that the provider counted fewer tokens for. Charges never rise.
    """
    found = session.client.operator.provider_exports.compare(
        content=_read(file), models=_names(models) or {}, apply=apply
    )
    if session.as_json:
        output.print_json(found)
        return
    output.print_table(found["differences"], _DIFFERENCE, "No differences.")
    more = f" {found['more']:,} more differences are not shown." if found["more"] else ""
    compared = f"Compared {found['days']:,} days and models, and {found['requests']:,} requests."
    is_due = any(row["credit_usd"] != "0.00" for row in found["differences"])
    advice = " --apply credits what tenants are charged too much." if is_due and not apply else ""
    click.echo(f"{compared}{more}{advice}", err=True)


reconcile = api_command(
    "reconcile",
    _with_options(
        _reconcile,
        (
            click.argument("file", type=_FILE),
            _MODELS,
            click.option("--apply", is_flag=True, help="Credit what tenants are charged too much, once."),
        ),
    ),
    example="millrace reconcile export.csv --model fast=gpt-4o-mini",
)


def _read(file: Path) -> str:
    """Return the text of a file, which may be gzipped."""
    with file.open("rb") as raw:
        is_gzipped = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(file) if is_gzipped else file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            fail(f"{file} is larger than {MAX_FILE_BYTES:,} bytes")
        return content.decode()
    except (OSError, EOFError, ValueError) as exc:
        fail(f"{file}: {exc}")


def _names(models: Sequence[str]) -> dict[str, str]:
    """Return the given names by deployment. A deployment without a name has the same name in the file."""
    found = {}
    for text in models:
        deployment, _, name = text.partition("=")
        if not deployment:
            raise click.UsageError(f"--model {text!r} names no deployment. Give it like fast=gpt-4o-mini.")
        found[deployment] = name or deployment
    return found


def _catalog_names(deployments: Sequence[Mapping[str, Any]], content: str, file: Path) -> dict[str, str]:
    """Return the names in the public file of the models that deployments serve, by deployment."""
    try:
        listed = json.loads(content)
    except ValueError as exc:
        fail(f"{file}: {exc}")
    found = {}
    for deployment in deployments:
        model = deployment.get("upstream_model") or deployment["name"]
        for name in (f"{deployment.get('preset')}/{model}", model):
            if name in listed:
                found[str(deployment["name"])] = name
                break
    if not found:
        fail(f"{file} has no model of the catalog's deployments; name them with --model DEPLOYMENT=NAME")
    return found
