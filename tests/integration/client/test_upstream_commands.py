"""Commands for upstreams against the management API: credentials, deployments, and the import from LiteLLM."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from billing.models import Budget
from millrace import cli
from millrace.apps.deployments.models import Deployment
from millrace.cli import app
from tenants.credentials.encryption import decrypt_secret
from tenants.models import ApiKey, LimitSet, RoutingPolicy, RoutingPolicyDraft, Tenant, UpstreamCredential
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
Run = Callable[..., Result]
CONFIG = """
model_list:
  - model_name: gpt-4o
    litellm_params: {model: openai/gpt-4o, api_key: os.environ/OPENAI_API_KEY}
  - model_name: gpt-4o
    litellm_params: {model: azure/eu, api_base: "https://eu.openai.azure.com", api_key: os.environ/OPENAI_API_KEY}
  - model_name: claude
    litellm_params: {model: anthropic/claude-sonnet-4, api_key: sk-ant-in-the-file}
  - model_name: titan
    litellm_params: {model: bedrock/titan}
"""
TABLES = """
CREATE SCHEMA litellm; SET search_path = litellm;
CREATE TABLE "LiteLLM_TeamTable" (team_id text, team_alias text, models text[], max_budget float8,
    budget_duration text, rpm_limit bigint, blocked boolean DEFAULT false, created_at timestamp DEFAULT now());
CREATE TABLE "LiteLLM_VerificationToken" (token text, key_name text, key_alias text, team_id text, models text[],
    expires timestamp, tpm_limit bigint, created_at timestamp DEFAULT now());
INSERT INTO "LiteLLM_TeamTable" VALUES
    ('t1', 'Search', '{gpt-4o}', 12.5, '1d', 60), ('t2', 'Ads', '{}', null, null, null);
INSERT INTO "LiteLLM_VerificationToken" SELECT repeat(n::text, 64), 'sk-...' || n, 'ci-' || n, 't' || (n % 2 + 1),
    '{}', null, 1000 FROM generate_series(1, 3) n;
"""


@pytest.fixture
def run(connect: Any, key_connection: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command line as a tenant, or as an operator."""

    def run(*line: Any, connection: Any = key_connection, status: int = 0, stdin: str | None = None) -> Result:
        monkeypatch.setattr(app, "find_connection", lambda *_: connection)
        monkeypatch.setattr(app, "make_client", connect)
        said = CliRunner().invoke(cli.root, [str(word) for word in line], input=stdin)
        assert said.exit_code == status, said.output
        return said

    return run


@pytest.fixture
def operate(run: Run, operator_connection: Any) -> Run:
    return lambda *line, **options: run(*line, connection=operator_connection, **options)


@pytest.fixture
def litellm_url() -> Iterator[str]:
    """The URL of LiteLLM's tables, as Prisma writes it."""
    url = os.environ["MILLRACE_DATABASE_URL"]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLES)
    yield f"{url}?schema=litellm&connection_limit=5"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA litellm CASCADE")


def secret_of(name: str) -> str:
    (row,) = unscoped(UpstreamCredential).filter(name=name)
    return decrypt_secret(row)


def test_credentials(run: Run, operate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-from-environment")
    made = json.loads(
        operate("credentials", "add", "openai", "--platform", "--secret-env", "UPSTREAM_KEY", "--json").stdout
    )
    assert secret_of("openai") == "sk-from-environment"
    said = operate("credentials", "rotate", made["id"], "--platform", stdin="sk-from-stdin\n")
    assert "version 2" in said.stdout
    assert secret_of("openai") == "sk-from-stdin"
    operate("credentials", "update", made["id"], "--platform", "--max-concurrency", "8")
    listed = operate("credentials", "list", "--platform").output
    assert "openai" in listed
    assert "sk-from" not in listed + said.output
    assert operate("credentials", "reencrypt").stdout.startswith("Encrypted 0")
    own = json.loads(run("credentials", "add", "mine", "--model", "gpt", "--json", stdin="sk-own").stdout)
    assert (own["models"], secret_of("mine")) == (["gpt"], "sk-own")
    run("credentials", "remove", own["id"])
    assert "mine" not in run("credentials").stdout
    run("credentials", "add", "none", stdin="sk-x", status=2)  # without a model
    run("credentials", "add", "x", "--model", "m", "--secret-env", "UNSET_VARIABLE", status=2)
    operate("deployments", "add", "gpt", "--engine", "openai", "--model", "gpt-x", status=1)  # without a base URL
    operate("deployments", "add", "gpt", status=2)
    arguments = ("--engine", "openai", "--preset", "openai", "--model", "gpt-x", "--credential-env", "UPSTREAM_KEY")
    added = json.loads(operate("deployments", "add", "gpt", *arguments, "--json").stdout)
    assert (added["engine"], added["source"]) == ("openai", "https://api.openai.com/v1")
    assert secret_of("gpt") == "sk-from-environment"
    operate("credentials", "remove", added["credential_id"], "--platform", status=1)


def test_an_import_from_litellm(
    operate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, litellm_url: str
) -> None:
    config, mapping = tmp_path / "config.yaml", tmp_path / "keys.csv"
    config.write_text(CONFIG)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai-secret")
    line = ("import", "litellm", config, "--database-url", litellm_url, "--mapping", mapping)
    before = (unscoped(Deployment).count(), unscoped(Tenant).count(), unscoped(ApiKey).count())
    printed = operate(*line, "--dry-run").stdout
    for part in ("gpt-4o-2", "Routing policies of each tenant: 1", "search", "$12.50 / day", "ci-3", "bedrock"):
        assert part in printed
    assert "sk-ant-in-the-file" not in operate(*line, "--dry-run", "--json").stdout + printed
    assert (unscoped(Deployment).count(), unscoped(Tenant).count(), unscoped(ApiKey).count()) == before
    assert not mapping.exists()

    said = operate(*line)
    assert "sk-openai-secret" not in said.output
    assert {row.name for row in unscoped(Deployment).filter(engine__in=["openai", "anthropic"])} == {
        "gpt-4o",
        "gpt-4o-2",
        "claude",
    }
    assert (secret_of("openai_api_key"), secret_of("claude")) == ("sk-openai-secret", "sk-ant-in-the-file")
    tenants = {row.slug: row for row in unscoped(Tenant).filter(slug__in=["search", "ads"])}
    assert set(tenants) == {"search", "ads"}
    search = tenants["search"].pk
    (budget,) = unscoped(Budget).filter(tenant_id=search)
    assert (budget.amount, budget.period, budget.mode) == (12_500_000_000, "day", "hard")
    rows = unscoped(LimitSet).filter(tenant_id=search)
    limits = {(row.scope, row.requests_per_minute, row.tokens_per_minute) for row in rows}
    assert limits == {("tenant", 60, None), ("key", None, 1000)}
    drafts = unscoped(RoutingPolicyDraft).filter(tenant_id=search, name="gpt-4o")  # the models have no prices yet
    assert [draft.body["models"] for draft in drafts] == [["gpt-4o", "gpt-4o-2"]]
    assert unscoped(RoutingPolicy).filter(tenant_id=search, name="gpt-4o") == []
    assert mapping.stat().st_mode & 0o777 == 0o600
    rows = list(csv.DictReader(mapping.open()))
    assert sorted((row["name"], row["tenant"]) for row in rows) == [
        ("ci-1", "ads"),
        ("ci-2", "search"),
        ("ci-3", "ads"),
    ]
    assert all(row["api_key"].startswith("sk-mr-") for row in rows)

    count = unscoped(ApiKey).count()
    lines = mapping.read_text().splitlines(keepends=True)
    mapping.write_text("".join(lines[:-1]))  # as if it was killed before it wrote the last key
    operate(*line)
    assert mapping.read_text().splitlines() == [text.strip() for text in lines]
    operate(*line)  # again: changes nothing
    assert unscoped(ApiKey).count() == count
    assert len(unscoped(RoutingPolicyDraft).filter(tenant_id=search, name="gpt-4o")) == 1
    assert unscoped(Budget).filter(tenant_id=search)[1:] == []
    mapping.chmod(0o644)
    assert "readable by others" in operate(*line, status=1).output
