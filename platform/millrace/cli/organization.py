"""`millrace organization update` and `audit`: the settings of a tenant and the log of its changes."""

from __future__ import annotations

from typing import Any

import click

from millrace.cli.app import ResourceGroup, Session, api_command, command, given_options
from millrace.cli.output import Column, moment, parse_tenant_amount

UNKNOWN_PARAMETERS = click.Choice(["default", "reject", "warn"])

_AUDIT = [
    Column("id", "id", right=True),
    Column("time", "created_at", moment),
    Column("actor", "actor"),
    Column("action", "action"),
    Column("object", "object_name"),
    Column("IP address", "ip_address"),
]


@click.group(cls=ResourceGroup, default="show")
def organization() -> None:
    """Show and change the settings of the tenant."""


@command(organization, "update", example="millrace organization update --content-retention-days 30")
@click.option("--name", help="New name.")
@click.option(
    "--content-retention-days", type=click.IntRange(0), metavar="N", help="Days of stored prompts; 0: not stored."
)
@click.option("--unknown-parameters", type=UNKNOWN_PARAMETERS, help="What happens to unknown fields of requests.")
@click.option(
    "--allowed-origin",
    "allowed_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin that may call the API from a browser; repeat.",
)
@click.option(
    "--answer-cache-seconds", type=click.IntRange(0, 2_592_000), help="Lifetime of cached answers; 0: none is cached."
)
@click.option(
    "--answer-cache-sampled/--no-answer-cache-sampled",
    default=None,
    help="Whether answers with a temperature above 0 are cached too.",
)
@click.option(
    "--answer-cache-scope",
    type=click.Choice(["tenant", "project"]),
    help="Whether all projects share cached answers, or only the keys of a project.",
)
@click.option(
    "--semantic-cache-max-error-percent",
    type=click.IntRange(0, 20),
    help="Maximum error rate of answers to similar questions; 0: none are served.",
)
@click.option(
    "--cache-warming", metavar="DECIMAL", help="Daily budget of cache warming, such as 0.50; 0: caches are not warmed."
)
@click.option("--no-allowed-origins", is_flag=True, help="Allow no web origin.")
def update_organization(session: Session, no_allowed_origins: bool, cache_warming: str | None, **fields: Any) -> None:
    """Change the settings of the tenant."""
    given = given_options(fields)
    if cache_warming is not None:
        given["cache_warming_nano"] = parse_tenant_amount(cache_warming, "the budget", "--cache-warming")
    if no_allowed_origins:
        if "allowed_origins" in given:
            raise click.UsageError("Give either --allowed-origin or --no-allowed-origins.")
        given["allowed_origins"] = []
    if not given:
        raise click.UsageError("Give at least one option to change.")
    session.done(session.client.tenant.update(**given), "Changed the organization.")


@click.option("--action", help="Only this action, such as key.revoked.")
@click.option("--actor", help="Only this actor, by email address.")
@click.option("--object-type", metavar="TYPE", help="Only objects of this type, such as apikey.")
@click.option("--object", "object_id", type=int, metavar="ID", help="Only the object with this ID.")
@click.option("--since", metavar="TIME", help="Start of the period, such as 2026-11-01T00:00Z.")
@click.option("--until", metavar="TIME", help="End of the period, exclusive.")
def _audit(session: Session, limit: int, **filters: Any) -> None:
    """List the entries of the audit log, newest first. With --json also the values before and after."""
    session.rows(session.client.audit.list(**given_options(filters)), _AUDIT, limit=limit, empty="No entries.")


audit = api_command("audit", _audit, example="millrace audit --action key.revoked --since 2026-11-01T00:00", rows=True)
