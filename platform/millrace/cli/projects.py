"""`millrace projects`, `organization` and `audit`: the settings of a tenant and the log of its changes."""

from __future__ import annotations

from typing import Any

import click

from millrace.cli.app import ResourceGroup, Session, api_command, command, given_options
from millrace.cli.output import Column, join_values, moment, nano_amount, number, parse_tenant_amount, yes_no

UNKNOWN_PARAMETERS = click.Choice(["default", "reject", "warn"])

_PROJECT = [
    Column("id", "id", right=True),
    Column("slug", "slug"),
    Column("name", "name"),
    Column("created", "created_at", moment),
]
_ORGANIZATION = [
    Column("id", "id", right=True),
    Column("slug", "slug"),
    Column("name", "name"),
    Column("status", "status"),
    Column("days of stored content", "content_retention_days", number),
    Column("unknown parameters", "unknown_parameters"),
    Column("allowed origins", "allowed_origins", join_values),
    Column("answer cache, seconds", "answer_cache_seconds", number),
    Column("sampled answers cached", "answer_cache_sampled", yes_no),
    Column("cached answers shared by", "answer_cache_scope"),
    Column("errors of similar answers, %", "semantic_cache_max_error_percent", number),
    Column("cache warming per day", "cache_warming_nano", nano_amount),
    Column("created", "created_at", moment),
    Column("purged after", "purge_after", moment),
]
_AUDIT = [
    Column("id", "id", right=True),
    Column("time", "created_at", moment),
    Column("actor", "actor"),
    Column("action", "action"),
    Column("object", "object_name"),
    Column("IP address", "ip_address"),
]


@click.group(cls=ResourceGroup)
def projects() -> None:
    """Manage projects, which group API keys."""


@command(projects, "list", example="millrace projects list", rows=True)
def list_projects(session: Session, limit: int) -> None:
    """List the projects, newest first."""
    session.rows(session.client.projects.list(), _PROJECT, limit=limit, empty="No projects.")


@command(projects, "create", example='millrace projects create "Search" --slug search')
@click.argument("name")
@click.option("--slug", help="Short name that cannot be changed; default: derived from the name.")
def create_project(session: Session, name: str, **fields: Any) -> None:
    """Create a project."""
    project = session.client.projects.create(name=name, **given_options(fields))
    session.done(project, f"Created the project {project['id']} ({project['slug']}).")


@command(projects, "rename", example='millrace projects rename 4 "Search and chat"')
@click.argument("id", type=int)
@click.argument("name")
def rename_project(session: Session, id: int, name: str) -> None:
    """Rename a project."""
    session.done(session.client.projects.update(id, name=name), f"Renamed the project {id}.")


@command(projects, "delete", example="millrace projects delete 4")
@click.argument("id", type=int)
def delete_project(session: Session, id: int) -> None:
    """Delete a project that never had an API key."""
    session.client.projects.delete(id)
    session.done({"id": id, "deleted": True}, f"Deleted the project {id}.")


@click.group(cls=ResourceGroup, default="show")
def organization() -> None:
    """Show and change the settings of the tenant."""


@command(organization, "show", example="millrace organization show")
def show_organization(session: Session) -> None:
    """Show the tenant."""
    session.one(session.client.tenant.get(), _ORGANIZATION)


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
