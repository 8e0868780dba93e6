"""`millrace credentials`: API keys for upstreams, of the tenant or of the platform. No command prints a secret."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from millrace.cli.app import USAGE, ResourceGroup, Session, command, fail, given_options
from millrace.cli.output import Column, join_values, moment

MAX_SECRET_BYTES = 8192
_CREDENTIAL = [
    Column("id", "id", right=True),
    Column("name", "name"),
    Column("models", lambda row: join_values(row.get("models") or ())),
    Column("nano-USD/day", "daily_spend_limit_nano", right=True),
    Column("concurrency", "max_concurrency", right=True),
    Column("version", "version", right=True),
    Column("created", "created_at", moment),
    Column("rotated", "rotated_at", moment),
]
_platform = click.option("--platform", is_flag=True, help="Of the platform, for its deployments (operators).")
_secret_env = click.option(
    "--secret-env", metavar="VAR", help="Environment variable with the secret; default: standard input."
)


@click.group(cls=ResourceGroup)
def credentials() -> None:
    """Manage API keys for upstreams: the tenant's own, or with --platform those of deployments."""


def read_secret(variable: str | None) -> str:
    """Return a secret from an environment variable, or from standard input without its final newline.

    Command lines are visible to other users of a machine, so no argument has a secret.
    """
    if variable is not None:
        secret = os.environ.get(variable, "")
        if not secret:
            fail(f"The environment variable {variable} is not set. Export it with the secret.", USAGE)
        return secret
    if sys.stdin.isatty():
        entered: str = click.prompt("Secret", hide_input=True, err=True)
        return entered
    return sys.stdin.read(MAX_SECRET_BYTES + 1).rstrip("\r\n")


def _resource(session: Session, platform: bool) -> Any:
    return session.client.operator.upstream_credentials if platform else session.client.upstream_credentials


@command(credentials, "list", example="millrace credentials list --platform", rows=True)
@_platform
def list_credentials(session: Session, limit: int, platform: bool) -> None:
    """List the credentials, without their secrets."""
    session.rows(_resource(session, platform).list(), _CREDENTIAL, limit=limit, empty="No credentials.")


@command(credentials, "add", example="millrace credentials add openai --platform --secret-env OPENAI_API_KEY")
@click.argument("name")
@_platform
@_secret_env
@click.option("--model", "models", multiple=True, metavar="MODEL", help="Use it for this model (tenants); repeat.")
@click.option("--daily-spend-limit", "daily_spend_limit_nano", type=int, metavar="NANO", help="Nano-USD per day (UTC).")
@click.option("--max-concurrency", type=int, metavar="N", help="Concurrent requests; not enforced yet.")
def add_credential(session: Session, name: str, platform: bool, secret_env: str | None, **options: Any) -> None:
    """Store a credential. Its secret is read from --secret-env or standard input."""
    fields = given_options(options)
    if platform == bool(fields.get("models")):
        fail("Name the tenant's models with --model, or use --platform for a credential of deployments.", USAGE)
    made = _resource(session, platform).create(name=name, secret=read_secret(secret_env), **fields)
    session.done(made, f"Stored the credential {made['id']} ({name}).")


@command(credentials, "update", example="millrace credentials update 3 --platform --daily-spend-limit 50000000000")
@click.argument("id", type=int)
@_platform
@click.option("--name", help="New name.")
@click.option("--model", "models", multiple=True, metavar="MODEL", help="Use it for these models only; repeat.")
@click.option("--daily-spend-limit", "daily_spend_limit_nano", type=int, metavar="NANO", help="Nano-USD per day (UTC).")
@click.option("--max-concurrency", type=int, metavar="N", help="Concurrent requests; not enforced yet.")
def update_credential(session: Session, id: int, platform: bool, **options: Any) -> None:
    """Change the name, the models or the limits of a credential."""
    session.done(_resource(session, platform).update(id, **given_options(options)), f"Updated the credential {id}.")


@command(credentials, "rotate", example="millrace credentials rotate 3 --platform --secret-env NEW_OPENAI_KEY")
@click.argument("id", type=int)
@_platform
@_secret_env
def rotate_credential(session: Session, id: int, platform: bool, secret_env: str | None) -> None:
    """Replace the secret of a credential. Workers use the new one within seconds."""
    row = _resource(session, platform).rotate(id, secret=read_secret(secret_env))
    session.done(row, f"Rotated the credential {id}: version {row['version']}. Revoke the old secret at the upstream.")


@command(credentials, "remove", example="millrace credentials remove 3 --platform")
@click.argument("id", type=int)
@_platform
def remove_credential(session: Session, id: int, platform: bool) -> None:
    """Remove a credential. Deployments must not use it."""
    _resource(session, platform).delete(id)
    session.done({"id": id, "removed": True}, f"Removed the credential {id}.")
