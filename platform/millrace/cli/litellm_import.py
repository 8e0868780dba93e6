"""`millrace import litellm`: models, teams, keys and budgets of a LiteLLM proxy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import click

from millrace.cli.app import FAILED, USAGE, ResourceGroup, Session, command, fail, server_packages
from millrace.cli.litellm_plan import Database, Plan, PlannedBudget, PlannedKey, PlannedScope, make_plan
from millrace.cli.output import Column, nano_usd, print_json, print_table

if TYPE_CHECKING:
    from millrace.client import Client

MAX_FILE_BYTES = 4 << 20
MAX_ROWS = 100_000
CONNECT_SECONDS = 10
_LIBPQ_PARAMETERS = {"application_name", "gssencmode", "host", "options", "port", "target_session_attrs"}
_TABLES = {
    "organizations": "LiteLLM_OrganizationTable",
    "teams": "LiteLLM_TeamTable",
    "keys": "LiteLLM_VerificationToken",
    "budgets": "LiteLLM_BudgetTable",
    "models": "LiteLLM_ProxyModelTable",
}
_MAPPING_FIELDS = ("litellm_token_hash", "litellm_key", "name", "tenant", "project", "key_id", "api_key")


@click.group(cls=ResourceGroup, default="--help")
def import_group() -> None:
    """Import the configuration of another gateway (operators)."""


@command(import_group, "litellm", example="millrace import litellm config.yaml --dry-run")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--database-url",
    envvar="LITELLM_DATABASE_URL",
    metavar="URL",
    help="LiteLLM's PostgreSQL, for teams, keys and budgets. The variable LITELLM_DATABASE_URL hides it from others.",
)
@click.option("--dry-run", is_flag=True, help="Only print what maps and what does not.")
@click.option(
    "--mapping",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("litellm-keys.csv"),
    show_default=True,
    help="File for the new API keys, readable only by you. It is continued if it exists.",
)
@click.option("--allow-internal", is_flag=True, help="Import models at internal addresses too.")
@click.option("--default-tenant", metavar="SLUG", default="", help="Tenant for the keys without a team.")
def import_litellm(
    session: Session,
    config: Path,
    database_url: str | None,
    dry_run: bool,
    mapping: Path,
    allow_internal: bool,
    default_tenant: str,
) -> None:
    """Import a LiteLLM proxy: models become deployments, teams tenants and projects, keys new keys.

    The database is only read. An interrupted import can be started again: what exists stays as it is.
    """
    database = Database() if not database_url else read_database(database_url)
    plan = make_plan(_read_config(config), database, allow_internal=allow_internal, default_tenant=default_tenant)
    if session.as_json:
        _print_plan_json(plan)
    else:
        print_plan(plan)
    if dry_run:
        return
    try:
        execute(session, plan, mapping)
    except OSError as exc:
        fail(f"{mapping} cannot be written: {exc}", FAILED)
    click.echo("The import is complete. Set prices before tenants use the models.", err=True)


def read_database(url: str) -> Database:
    """Read the tables of LiteLLM in a read-only transaction, as JSON because the columns depend on its version."""
    with server_packages():
        import psycopg
        from psycopg import sql

    url, schema = _without_prisma_options(url)
    try:
        with psycopg.connect(url, connect_timeout=CONNECT_SECONDS) as connection:
            connection.read_only = True
            if schema:
                connection.execute("SELECT set_config('search_path', %s, true)", [schema])
            rows: dict[str, list[Mapping[str, Any]]] = {}
            for field, table in _TABLES.items():
                exists = connection.execute("SELECT to_regclass(%s)", [f'"{table}"']).fetchone()
                if exists is None or exists[0] is None:
                    rows[field] = []
                    continue
                query = sql.SQL("SELECT to_jsonb(t) FROM {} t ORDER BY to_jsonb(t)->>'created_at' LIMIT {}")
                found = connection.execute(query.format(sql.Identifier(table), sql.Literal(MAX_ROWS + 1))).fetchall()
                if len(found) > MAX_ROWS:
                    fail(f"{table} has more than {MAX_ROWS} rows, which is too many for one import.", FAILED)
                rows[field] = [row[0] for row in found]
            return Database(**rows)
    except psycopg.Error as exc:
        fail(f"LiteLLM's database cannot be read: {type(exc).__name__}. Check --database-url.", FAILED)


def _without_prisma_options(url: str) -> tuple[str, str]:
    """Return the URL without the parameters that only Prisma has, and the schema that it names."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    kept = {name: value for name, value in query.items() if name.startswith("ssl") or name in _LIBPQ_PARAMETERS}
    return parts._replace(query=urlencode(kept)).geturl(), query.get("schema", "")


def print_plan(plan: Plan) -> None:
    """Print the objects that the plan creates, and the parts that are not imported."""
    models = [
        {"name": each.name, "credential": each.credential or "–", **{"base_url": "", "preset": ""}, **each.options}
        for each in plan.deployments
    ]
    columns = [Column(name, name) for name in ("name", "engine", "preset", "upstream_model", "base_url", "credential")]
    _section("Deployments", models, columns)
    policies: list[Any] = [{"name": name, "targets": ", ".join(targets)} for name, targets in plan.policies.items()]
    _section("Routing policies of each tenant", policies, [Column("name", "name"), Column("targets", "targets")])
    scopes = [("tenant", each.slug, each) for each in plan.tenants]
    scopes += [("project", f"{slug}/{each.slug}", each) for slug, rows in plan.projects.items() for each in rows]
    rows = [{"type": kind, "slug": slug, **_terms(each)} for kind, slug, each in scopes]
    terms = [Column("limits", "limits"), Column("budget", "budget")]
    _section("Tenants and projects", rows, [Column("type", "type"), Column("slug", "slug"), *terms])
    keys = [{"key": each.name, "place": f"{each.tenant}/{each.project}", **_terms(each)} for each in plan.keys]
    _section("API keys", keys, [Column("key", "key"), Column("tenant/project", "place"), *terms])
    unmapped: list[Any] = [each._asdict() for each in plan.unmapped]
    _section("Not imported, or changed", unmapped, [Column("subject", "subject"), Column("reason", "reason")])


def execute(session: Session, plan: Plan, mapping: Path) -> None:
    """Create the objects of the plan. Existing objects with the same names are not changed."""
    operator = session.client.operator
    credentials = {row["name"]: row["id"] for row in operator.upstream_credentials.list()}
    for credential in plan.credentials:
        secret = os.environ.get(credential.variable, "") if credential.variable else credential.literal
        if credential.name in credentials:
            continue
        if not secret:
            click.echo(f"No credential {credential.name}: {credential.variable} is not set.", err=True)
            continue
        credentials[credential.name] = operator.upstream_credentials.create(name=credential.name, secret=secret)["id"]
    existing = {row["name"] for row in operator.deployments.list()}
    for deployment in plan.deployments:
        if deployment.name in existing:
            click.echo(f"The deployment {deployment.name} exists already and stays as it is.", err=True)
            continue
        options = dict(deployment.options)
        if deployment.credential in credentials:
            options["credential_id"] = credentials[deployment.credential]
        operator.deployments.create(name=deployment.name, **options)
    written = _MappingFile(mapping) if plan.keys else None
    for tenant in plan.tenants:
        if not any(row["slug"] == tenant.slug for row in operator.tenants.list(slug=tenant.slug)):
            operator.tenants.create(slug=tenant.slug, name=tenant.name)
        with session.tenant_client(tenant.slug) as client:
            _create_rules(client, tenant)
            projects = {row["slug"]: row["id"] for row in client.projects.list()}
            for project in plan.projects.get(tenant.slug, ()):
                if project.slug not in projects:
                    made = client.projects.create(name=project.name, slug=project.slug)
                    projects[project.slug] = made["id"]
                _create_rules(client, project, project_id=projects[project.slug])
            published = {row["name"] for row in client.policies.list(active=True)}
            for name, targets in plan.policies.items():
                if name not in published:
                    _publish(client, name, {"models": targets})
            for key in plan.keys:
                if key.tenant == tenant.slug and written is not None and key.token not in written.tokens:
                    _create_key(client, key, projects[key.project], written)
    if written is not None:
        click.echo(f"{mapping} has the new API keys. Give them to their users, then delete the file.", err=True)


def _publish(client: Client, name: str, body: dict[str, Any]) -> None:
    """Publish a policy, or save it as a draft if its models have no prices yet."""
    from millrace.client import InvalidRequest

    try:
        client.policies.publish(name=name, body=body)
    except InvalidRequest as exc:
        if exc.code != "model_not_priced":
            raise
        draft = client.policy_drafts.save(name=name, body=body)
        click.echo(f"The policy {name} is a draft ({draft['id']}): publish it after its models have prices.", err=True)


class _MappingFile:
    """The file with the new API keys, which only its owner can read.

    A line is on disk before the next key is created.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        Raises:
            OSError: it cannot be written, or is readable by others.
        """
        from tenants import csv_tables

        self._path = path
        self.tokens: set[str] = set()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "r", encoding="utf-8", newline="") as file:
            if os.fstat(descriptor).st_mode & 0o077:
                raise PermissionError(f"{path} is readable by others; run chmod 600, or choose another --mapping")
            self.tokens = {row["litellm_token_hash"] for row in csv_tables.read_table(file) if row.get("api_key")}
        if path.stat().st_size == 0:
            self._write(_MAPPING_FIELDS)

    def add(self, key: PlannedKey, key_id: int, api_key: str) -> None:
        self._write((key.token, key.old_name, key.name, key.tenant, key.project, key_id, api_key))
        self.tokens.add(key.token)

    def _write(self, row: Sequence[object]) -> None:
        from tenants import csv_tables

        with self._path.open("a", encoding="utf-8", newline="") as file:
            file.write(csv_tables.as_csv([str(value) for value in row], ()))
            file.flush()
            os.fsync(file.fileno())


def _create_key(client: Client, key: PlannedKey, project_id: int, written: _MappingFile) -> None:
    """Create a key, its limits and its budget. If the process was killed before, the repeated call has the same key."""
    made = client.keys.create(
        name=key.name,
        project_id=project_id,
        allowed_models=None if key.allowed_models is None else list(key.allowed_models),
        expires_at=key.expires_at,
        idempotency_key=f"litellm-{key.token[:64]}",
    )
    scope = PlannedScope("", key.name, key.limits, key.budget)
    _create_rules(client, scope, key_id=made["id"])
    written.add(key, made["id"], made["secret"])


def _create_rules(client: Client, scope: PlannedScope, **owner: int) -> None:
    """Set the limits of a tenant, project or key, and create its budget once."""
    if scope.limits:
        client.limits.set(**owner, **scope.limits)  # type: ignore[arg-type]
    if scope.budget is None:
        return
    known = {(row["name"], row["project_id"], row["key_id"]) for row in client.budgets.list(active=True)}
    if (scope.budget.name, owner.get("project_id"), owner.get("key_id")) not in known:
        client.budgets.create(
            name=scope.budget.name,
            amount=scope.budget.amount_nano,
            unit="money",
            period=scope.budget.period,
            mode="hard",
            **owner,  # type: ignore[arg-type]
        )


def _read_config(path: Path) -> Mapping[str, Any]:
    import yaml

    if path.stat().st_size > MAX_FILE_BYTES:
        fail(f"{path} is larger than {MAX_FILE_BYTES} bytes.", FAILED)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        fail(f"{path} cannot be read as YAML: {exc}", FAILED)
    if not isinstance(found, dict) or not isinstance(found.get("model_list", []), list):
        fail(f"{path}: want a LiteLLM configuration with a model_list.", USAGE)
    return found


def _section(title: str, rows: list[Any], columns: list[Column]) -> None:
    click.echo(f"\n{title}: {len(rows)}")
    if rows:
        print_table(rows, columns, "")


def _terms(scope: PlannedScope | PlannedKey) -> dict[str, str]:
    limits = ", ".join(f"{name}={value}" for name, value in scope.limits.items())
    return {"limits": limits or "–", "budget": _budget_text(scope.budget)}


def _budget_text(budget: PlannedBudget | None) -> str:
    return "–" if budget is None else f"{nano_usd(budget.amount_nano)} / {budget.period}"


def _print_plan_json(plan: Plan) -> None:
    rows = asdict(plan)
    for credential in rows["credentials"]:
        credential.pop("literal")
    rows["unmapped"] = [each._asdict() for each in plan.unmapped]
    print_json(rows)
