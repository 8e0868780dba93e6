"""The commands of tenants and operators against the management API."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

from billing.invoicing.reratings import continue_reratings
from billing.ledger.credits import do_commit, do_grant_credit
from billing.models import CreditGrant, PriceBook, PriceBookAssignment, Rerating
from inference_worker.contract.command_line import format_command
from millrace import cli
from millrace.cli import app
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.jobs import run_jobs
from tenants.models import Tenant, User
from tests.support.billing.books import OCTOBER, invoiced, make_months, price, rate_card, use
from tests.support.billing.charts import CHART, read_datev

pytestmark = pytest.mark.django_db
Run = Callable[..., Result]


@pytest.fixture
def run(connect, key_connection, monkeypatch) -> Run:
    """Return a function that runs a command line as a tenant, or as an operator, and checks how it ends."""

    def run(*line: str, connection: Any = key_connection, fails: bool = False) -> Result:
        monkeypatch.setattr(app, "find_connection", lambda *_: connection)
        monkeypatch.setattr(app, "make_client", connect)
        said = CliRunner().invoke(cli.root, [str(word) for word in line])
        assert bool(said.exit_code) == fails, said.output
        return said

    return run


@pytest.fixture
def operate(run, operator_connection) -> Run:
    return lambda *line, **options: run(*line, connection=operator_connection, **options)


def printed(said: Result) -> Any:
    return json.loads(said.stdout)


def test_keys(run):
    options = ("--scope", "inference", "--model", "smollm2-135m", "--cost-center", "4711")
    secret = run("keys", "create", "ci", *options).stdout.strip()
    assert secret.startswith("sk-")
    key = next(row for row in printed(run("keys", "--json")) if row["name"] == "ci")
    assert (key["allowed_models"], key["cost_center"]) == (["smollm2-135m"], "4711")
    run("keys", "set-cost-center", key["id"], "R&D")
    assert "R&D" in run("keys", "show", key["id"]).stdout
    assert "60 characters" in run("keys", "set-cost-center", key["id"], "x" * 61, fails=True).output
    run("keys", "rename", key["id"], "build")
    assert "build" in run("keys", "show", key["id"]).stdout
    assert run("keys", "rotate", key["id"], "--overlap-hours", "1").stdout.startswith("sk-")
    run("keys", "revoke", key["id"])
    assert key["id"] in [row["id"] for row in printed(run("keys", "list", "--revoked", "--json"))]


def test_a_billing_entity_and_its_journal(furnished_acme, run, operate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_months()
    use(furnished_acme.tenant, OCTOBER, (price("4", model="journal"), 10**6))
    invoice = invoiced(furnished_acme.tenant, OCTOBER)
    default = next(row["id"] for row in printed(operate("billing", "entities", "--json")) if row["slug"] == "default")
    operate("billing", "update-entity", default, "--name", "Mill GmbH", "--reminder-email-text", "Please pay.")
    operate("billing", "update-entity", default, "--reminder-days", "10", "--reminder-days", "3")
    assert printed(operate("billing", "show-entity", default, "--json"))["reminder_days"] == [3, 10]
    assert "Mill GmbH" in operate("billing", "show-entity", default).stdout
    operate(
        "billing", "add-entity", "second", "--name", "Second Ltd", "--country", "IE", "--time-zone", "Europe/Dublin"
    )
    operate(
        *("billing", "add-tax-rule", "--entity", "second", "--country", "IE", "--category", "S"),
        *("--rate-ppm", "230000", "--starts-on", "2026-01-01"),
    )
    assert "acme" in operate("billing", "aging", default).stdout
    assert (
        printed(operate("billing", "aging", default, "--json"))[-1]["total"] == "3.00"
    )  # the tenant has paid 1.00 before
    assert "future" in operate("billing", "aging", default, "--date", "2199-01-01", fails=True).output
    tenant = next(row["id"] for row in printed(operate("tenants", "--json")) if row["slug"] == "acme")
    days = ("--from", "2026-11-01", "--to", f"{datetime.now(UTC).date()}")
    for asked in (run("invoices", "statement", *days), operate("invoices", "statement", "--tenant", tenant, *days)):
        assert invoice.number in asked.stdout and "closing balance" in asked.stdout
    assert printed(run("invoices", "statement", *days, "--json"))["lines"][0]["number"] == invoice.number
    for kind, start in (("csv", b"date,type"), ("pdf", b"%PDF-")):
        run("invoices", "statement", *days, "--format", kind)
        assert (tmp_path / f"statement.{kind}").read_bytes().startswith(start)
    assert (
        "before the first one"
        in run("invoices", "statement", "--from", "2026-11-30", "--to", "2026-11-01", fails=True).output
    )
    payment = printed(run("invoices", "payments", "--json"))[0]
    run("invoices", "receipt", payment["id"])
    assert (tmp_path / f"receipt-{payment['id']}.pdf").read_bytes().startswith(b"%PDF-")
    journal = ("invoices", "ledger", "--month", "2026-11", "--format")
    assert "no chart of accounts" in operate(*journal, "datev", fails=True).output
    (tmp_path / "wrong.csv").write_text(CHART.replace("1200", ""))
    numbers = ("--consultant", "1001", "--client", "7")
    refused = operate("billing", "set-chart", default, "wrong.csv", *numbers, fails=True).output
    assert "wrong.csv, line 3: The account number of cash is missing" in refused
    operate("billing", "chart", default, fails=True)
    (tmp_path / "accounts.csv").write_text(CHART)
    operate("billing", "set-chart", default, "accounts.csv", *numbers)
    assert "accounts.csv" in operate("billing", "chart", default).stdout
    operate(*journal, "datev")
    assert invoice.number in {
        row["Belegfeld 1"] for row in read_datev(Path("EXTF_default-2026-11.csv").read_bytes())[1]
    }
    assert "revenue" in operate("billing", "trial-balance", default, "--month", "2026-11").stdout
    do_grant_credit(furnished_acme.tenant, CreditGrant.GrantType.PROMOTIONAL, 10 * 10**9)
    this_month = f"{datetime.now(UTC):%Y-%m}"
    credit = printed(operate("billing", "prepaid-credit", default, "--month", this_month, "--by", "tenant", "--json"))
    assert [(row["tenant"], row["granted"]) for row in credit] == [("acme", "10.00")]
    operate(*journal, "csv", "--output", "journal.csv")
    assert str(invoice.number) in Path("journal.csv").read_text()
    assert "no billing entity 'third'" in operate(*journal, "csv", "--entity", "third", fails=True).output
    assert "needs --month" in operate("invoices", "ledger", "--format", "csv", fails=True).output
    assert "revenue" in run("invoices", "ledger").stdout
    assert "No ledger entries." in run("invoices", "ledger", "--month", "2020-01").stdout
    run(*journal, "csv", fails=True)  # not an operator


@pytest.fixture
def _web_jobs(monkeypatch) -> None:
    """Run the jobs while a command waits for their result."""
    monkeypatch.setattr("millrace.cli.job_results.time.sleep", lambda _: run_jobs())


@pytest.mark.usefixtures("_web_jobs")
def test_cache_warming(run, operate, monkeypatch):
    assert "$0.50" in (run("organization", "update", "--cache-warming", "0.50") and run("organization").stdout)
    run("organization", "update", "--content-retention-days", "1")
    assert printed(run("cache", "warm", "--json"))["prompts"] == 0
    with monkeypatch.context() as patch:
        patch.setattr(
            "millrace.apps.answer_caches.warming_jobs.do_warm_caches", Mock(side_effect=Conflict("It is off."))
        )
        assert "It is off." in run("cache", "warm", fails=True).output
    assert "expected saving" in operate("cache", "warm", "--tenant", "acme").stdout
    assert printed(run("cache", "warm", "--candidate", "0" * 32, "--json"))["prompts"] == 0
    assert printed(run("cache", "candidates", "--json"))["results"] == []
    assert "No stored prompts are repeated." in operate("cache", "candidates", "--tenant", "acme").stdout
    assert "$0.50" in run("cache").stdout
    assert printed(run("cache", "warming", "--from", "2026-11-01", "--to", "2026-11-02", "--json"))["results"] == []


def test_budgets_and_limits(run):
    made = printed(run("budgets", "create", "CI", "--amount", "12.50", "--threshold", "80", "--json"))
    assert (made["amount"], made["thresholds"]) == (12_500_000_000, [80])
    assert "$75.00" in run("budgets", "update", made["id"], "--amount", "75").stdout
    assert "$75.00" in run("budgets").stdout
    assert "tenant" in run("budgets", "show", made["id"]).stdout
    assert "forecast" in run("budgets", "forecast").stdout
    assert "forecast" in run("budgets", "forecast", made["id"]).stdout
    assert run("budgets", "alerts").stdout == "No alerts.\n"
    run("budgets", "remove", made["id"])
    assert "CI" not in run("budgets", "list", "--active").stdout
    limits = printed(run("limits", "set", "--requests-per-minute", "60", "--model", "m", "--json"))
    assert "requests_per_minute=60" in run("limits").stdout
    run("limits", "remove", limits["id"])


def test_members(run):
    member = next(row for row in printed(run("members", "--json")) if row["role"] == "developer")
    assert "readonly now" in run("members", "role", member["id"], "readonly").stdout
    run("members", "remove", member["id"])
    run("members", "invite", "new@acme.example", "--role", "admin")
    invitation = printed(run("members", "invitations", "--json"))[0]
    run("members", "revoke-invitation", invitation["id"])


def test_webhooks(run, furnished_acme):
    id = furnished_acme.ids["api-webhook"]
    assert "https://hooks.acme.example/" in run("webhooks").stdout
    assert run("webhooks", "rotate", id).stdout.startswith("whsec_")
    run("webhooks", "disable", id)
    assert "inactive" in run("webhooks").stdout
    run("webhooks", "enable", id)
    delivery = printed(run("webhooks", "test", id, "--json"))
    assert str(delivery["id"]) in run("webhooks", "deliveries").stdout
    run("webhooks", "replay", delivery["id"])
    run("webhooks", "delete", id)


def test_usage_requests_and_invoices(run, furnished_acme, tmp_path):
    assert run("usage").stdout == "No usage in this time.\n"
    assert printed(run("usage", "--by", "key", "--from", "2026-01-01", "--bucket", "day", "--json"))["rows"] == []
    assert run("usage", "events").stdout == "No usage events.\n"
    assert "req_of_acme" in run("requests").stdout
    assert "completed" in run("requests", "show", "req_of_acme").stdout
    assert "requests" in run("requests", "rates", "--bucket", "day").stdout
    id = furnished_acme.ids["api-invoice"]
    assert "draft" in run("invoices", "list", "--state", "draft").stdout
    assert "outstanding" in run("invoices", "show", id).stdout
    path = tmp_path / "invoice.csv"
    run("invoices", "download", id, "--format", "csv", "--output", str(path))
    assert path.stat().st_size > 0
    for kind in ("cii", "ubl"):  # a draft has no XML
        assert "Finalize it first" in run("invoices", "download", id, "--format", kind, fails=True).output


def test_projects_and_the_organization(run):
    project = printed(run("projects", "create", "Search", "--slug", "search", "--json"))
    run("projects", "rename", project["id"], "Search and chat")
    assert "Search and chat" in run("projects").stdout
    run("projects", "delete", project["id"])
    assert "search" not in run("projects").stdout
    run("organization", "update", "--content-retention-days", "3", "--allowed-origin", "https://a.example")
    shown = printed(run("organization", "--json"))
    assert (shown["content_retention_days"], shown["allowed_origins"]) == (3, ["https://a.example"])
    run("organization", "update", "--no-allowed-origins")
    assert printed(run("organization", "show", "--json"))["allowed_origins"] == []
    lines = run("audit", "--action", "project.deleted").stdout.splitlines()
    assert len(lines) == 2
    assert "earch" in lines[1]


def test_policies(run, tmp_path):
    path = tmp_path / "policy.json"
    path.write_text('{"rules": [{"targets": [{"model": "smollm2-135m"}]}]}')
    for command in (("publish", "quick", "--file", path), ("validate", path)):
        refused = run("policies", *command, fails=True).output
        assert "$.rules[0].targets[0].model: The model 'smollm2-135m' has no price yet." in refused
    early = printed(run("policies", "save-draft", "early", "--file", path, "--json"))
    assert [problem["code"] for problem in early["problems"]] == ["model_not_priced"]
    assert "has no price yet" in run("policies", "drafts").stdout
    run("policies", "discard-draft", early["id"])
    for model in ("smollm2-135m", "smollm2-135m-int8"):
        rate_card(model)
    first = printed(run("policies", "publish", "quick", "--file", path, "--json"))
    second = printed(run("policies", "publish", "quick", "--model", "smollm2-135m-int8", "--json"))
    assert (first["version"], second["version"]) == (1, 2)
    refused = run("policies", "publish", "quick", "--file", path, "--base-version", "1", fails=True).output
    assert "Version 2 was published since." in refused
    assert "smollm2-135m-int8" in run("policies", "show", second["id"]).stdout
    assert "version 3 of quick" in run("policies", "revert", first["id"]).stdout
    (active,) = printed(run("policies", "list", "--name", "quick", "--active", "--json"))
    run("policies", "withdraw", active["id"])
    assert run("policies", "list", "--name", "quick", "--active").stdout == "No policies.\n"
    assert "smollm2-135m" in run("policies", "validate", path).stdout
    assert "+" in run("policies", "diff", second["id"], "--against", first["id"]).stdout
    draft = printed(run("policies", "save-draft", "quick", "--file", path, "--json"))
    assert "quick" in run("policies", "drafts").stdout
    assert "version 4 of quick" in run("policies", "publish-draft", draft["id"]).stdout
    again = printed(run("policies", "save-draft", "quick", "--file", path, "--json"))
    assert again["based_on"] == 4
    run("policies", "discard-draft", again["id"])
    (other,) = printed(run("policies", "drafts", "--json"))  # of the fixture
    run("policies", "discard-draft", other["id"])
    assert run("policies", "drafts").stdout == "No drafts.\n"
    assert printed(run("policies", "dry-run", path, "--name", "quick", "--json"))["requests"] == 0


@pytest.mark.usefixtures("_web_jobs")
def test_amounts_are_in_the_currency_of_the_tenant(run, operate, furnished_acme, tmp_path):
    with all_tenants_scope(BypassReason.COMMAND):
        book = PriceBook.objects.create(name="eur", currency="EUR")
        PriceBookAssignment.objects.all_tenants().update_or_create(
            tenant=furnished_acme.tenant, defaults={"book": book}
        )
    made = printed(run("budgets", "create", "CI", "--amount", "12.50", "--json"))
    assert "€75.00" in run("budgets", "update", made["id"], "--amount", "75").stdout
    assert "€75.00" in run("budgets").stdout
    in_dollars = run("budgets", "update", made["id"], "--amount", "$75", fails=True)
    assert "the tenant's currency is EUR" in in_dollars.output
    granted = operate("tenants", "grant-credit", furnished_acme.tenant.pk, "--amount", "12.50").stdout
    assert granted.startswith("Granted €12.50 to the tenant")
    assert "€0.50" in (run("organization", "update", "--cache-warming", "0.50") and run("organization").stdout)
    run("organization", "update", "--content-retention-days", "1")
    assert "€0.50" in run("cache").stdout
    assert "€0.50" in operate("cache", "warming", "--tenant", "acme").stdout
    assert "€0.00" in run("policies", "dry-run", _policy(tmp_path), "--name", "quick").stdout
    assert "-€12.50" in run("invoices", "ledger").stdout
    printing = ("budgets forecast", "budgets alerts", "usage", "usage events", "usage prices", "requests", "cache warm")
    printing += ("requests success", "requests show req_of_acme", "invoices credits", "invoices commitments")
    for line in printing:
        shown = run(*line.split()).stdout
        assert "$" not in shown, line
        assert "USD" not in shown, line


def _policy(folder: Path) -> Path:
    path = folder / "policy.json"
    path.write_text('{"rules": [{"targets": [{"model": "smollm2-135m"}]}]}')
    return path


def test_prices_of_a_book_are_in_its_currency(operate, tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("model,tier,component,usd_per_million\nsmollm2-135m,standard,output,1234.5\n")
    for book, currency, text in (("list", "USD", "$1,234.50"), ("yen", "JPY", "JPY 1,234.5")):
        with all_tenants_scope(BypassReason.COMMAND):
            PriceBook.objects.get_or_create(name=book, defaults={"currency": currency})
        drafted = printed(operate("prices", "import", path, "--book", book, "--json"))["version"]
        assert text in operate("prices", "show", drafted["id"]).stdout


def test_money_of_the_tenant(run, operate, furnished_acme):
    operate("tenants", "grant-credit", furnished_acme.tenant.pk, "--amount", "12.50", "--note", "Thanks")
    paid = ("--amount", "250", "--reference", "W-1", "--received", "2026-11-20T00:00Z")
    assert "$250.00" in operate("tenants", "record-payment", furnished_acme.tenant.pk, *paid).stdout
    in_yen = operate("tenants", "record-payment", furnished_acme.tenant.pk, *paid, "--currency", "jpy", fails=True)
    assert "is in JPY" in in_yen.output and "is billed in USD" in in_yen.output
    assert "$12.50" in run("invoices", "credits").stdout
    assert "W-1" in run("invoices", "payments").stdout
    assert "$12.50" in run("invoices", "ledger").stdout
    run("invoices", "commitments")
    agreed = do_commit(furnished_acme.tenant, "Base", fee=4_200, included_nano=1, first_month="2999-01")
    assert "$42.00" in operate("tenants", "commitments", furnished_acme.tenant.pk).stdout
    ended = operate("tenants", "end-commitment", agreed.pk, "2999-02").stdout
    assert ended == "Ended the commitment Base after 2999-02.\n"
    assert "Choose the first month" in operate("tenants", "end-commitment", agreed.pk, "2998-12", fails=True).output
    rate_card()
    assert "uncached" in run("usage", "prices").stdout


def test_commitments_and_price_terms_of_a_tenant(operate, furnished_acme):
    tenant, months = furnished_acme.tenant.pk, ("--first-month", "2199-01", "--last-month", "2199-06")
    base = ("tenants", "add-commitment", tenant, "--name", "Base", "--included", "50", *months)
    assert operate(*base, "--fee", "42", "--starts-on", "2199-01-11").stdout.startswith("Added the commitment ")
    shown = operate("tenants", "commitments", tenant).stdout
    assert all(text in shown for text in ("$42.00", "$50.00", "2199-01-11", "2199-06"))
    assert "at most 2 decimals" in operate(*base, "--fee", "42.001", fails=True).output
    elsewhere = operate(*base, "--fee", "42", "--starts-on", "2199-02-11", fails=True).output
    assert "Choose a day of the first month" in elsewhere
    add = ("tenants", "add-price-term", tenant)
    agreed = ("--description", "Agreed", *months)
    tiers = ("--model", "m", "--component", "output", "--price", "0=0", "--price", "2000000=9.25")
    for kind, values, effect in (
        ("minimum", ("--amount", "500", "--starts-on", "2199-01-11"), "at least $500.00 per month"),
        ("discount", ("--percent", "12.5"), "12.5% less for all models"),
        ("volume", tiers, "volume, m, standard, output, from 0: $0.00, from 2,000,000: $9.25"),
    ):
        term = printed(operate(*add, kind, *values, *agreed, "--json"))
        assert effect in operate("tenants", "price-terms", tenant).stdout, kind
        ended = operate("tenants", "end-price-term", term["id"], "2199-03").stdout
        assert ended == "Ended the price term Agreed after 2199-03.\n"
    for values, problem in (
        (("discount", "--percent", "5", "--amount", "5"), "cents: a minimum requires an amount"),
        (("volume", "--model", "m", "--component", "output", "--price", "1=2"), "start the first of up to 100 tiers"),
        (("volume", "--price", "2.50"), "give a number of tokens and a price"),
        (("discount", "--percent", "1.00001"), "at most 4 decimals"),
    ):
        assert problem in operate(*add, *values, *agreed, fails=True).output, values


def test_a_charge_has_the_decimals_of_the_tenants_currency(operate, furnished_acme):
    tenant = furnished_acme.tenant.pk
    with all_tenants_scope(BypassReason.COMMAND):
        book = PriceBook.objects.create(name="yen", currency="JPY")
        PriceBookAssignment.objects.all_tenants().update_or_create(
            tenant=furnished_acme.tenant, defaults={"book": book}
        )
    agreed = ("--name", "Base", "--included", "5000", "--first-month", "2199-01")
    operate("tenants", "add-commitment", tenant, "--fee", "4200", *agreed)
    assert "JPY 4,200" in operate("tenants", "commitments", tenant).stdout
    minimum = ("minimum", "--amount", "0.5", "--description", "Minimum", "--first-month", "2199-01")
    assert "no decimals" in operate("tenants", "add-price-term", tenant, *minimum, fails=True).output


def test_usage_that_exists(run, furnished_acme):
    from tests.support.frontend.console import meter

    rate_card()
    meter(furnished_acme.tenant)
    lines = run("usage", "--by", "model", "--bucket", "day").stdout.splitlines()
    assert lines[0].split()[:2] == ["start", "model"]
    assert len(lines) == 3
    assert len(run("usage", "events").stdout.splitlines()) == 2


def test_operator(operate, furnished_acme, tmp_path: Path):
    assert "acme" in operate("tenants").stdout
    made = printed(operate("tenants", "create", "beta", "--owner", "owner@beta.example", "--json"))
    for action in ("suspend", "resume", "delete", "restore"):
        operate("tenants", action, made["id"])
    operate("tenants", "rename", made["id"], "Beta Labs")
    assert "Beta Labs" in operate("tenants", "show", made["id"]).stdout
    user = printed(operate("users", "list", "--no-operator", "--json"))[0]
    for action in ("deactivate", "reactivate", "grant-operator", "revoke-operator"):
        operate("users", action, user["id"])
    assert user["email"] in operate("users", "show", user["id"]).stdout
    assert "invoice prefix" in operate("billing", "entities").stdout
    entity = printed(operate("billing", "entities", "--json"))[0]["id"]
    for report, text in (("vat", "No documents"), ("ec-sales", "No sales with reverse"), ("oss", "No sales to")):
        assert text in operate("billing", report, entity, "--period", "2026-Q4").stdout
        assert "period" in operate("billing", report, entity, "--period", "2026-13", fails=True).output
    assert "Nothing was booked" in operate("billing", "trial-balance", entity, "--month", "2020-01").stdout
    assert "No credit until" in operate("billing", "prepaid-credit", entity, "--month", "2020-01").stdout
    assert "has not begun" in operate("billing", "trial-balance", entity, "--month", "2999-01", fails=True).output
    operate("billing", "tax-rules")
    operate("billing", "set-exchange-rate", "eur", "0.92", "--from", "2026-11-01")
    assert "0.920000" in operate("billing", "exchange-rates").stdout
    rates = tmp_path / "eurofxref.csv"
    rates.write_text("Date,USD,GBP,\n2026-10-30,1.25,0.875,\n")
    imported = operate("billing", "import-exchange-rates", str(rates), "--since", "2026-10-30").stdout
    assert "Imported 2 exchange rates until 2026-10-30; 0 were known." in imported
    table = tmp_path / "prices.csv"
    table.write_text("model,tier,component,usd_per_million\nnew-model,standard,output,3.75\n")
    version = printed(operate("prices", "import", str(table), "--json"))["version"]
    assert "3.75" in operate("prices", "show", version["id"]).stdout
    book = operate("tenants", "price-book", made["id"]).stdout.split()[-1]
    operate("tenants", "price-book", made["id"], "--set", book)
    operate("prices", "preview", version["id"])
    operate("prices", "discard", version["id"])
    assert "discarded" in operate("prices").stdout
    assert "entity" in operate("billing").stdout
    month = printed(operate("billing", "periods", "--json"))[0]["label"]
    operate("billing", "draft", furnished_acme.tenant.pk, "--month", month)
    assert "in quarantine" in operate("billing", "reconciliation").stdout
    assert "smollm2-135m" in operate("fleet", "models").stdout


def test_prices_of_past_usage_are_corrected_by_another_operator(operate, furnished_acme, tmp_path):
    """A draft from a CSV shows each invoice's change; another operator applies it, and the notes appear."""
    with all_tenants_scope(BypassReason.COMMAND):
        tenant = Tenant.objects.all_tenants().get(slug="acme")
    make_months()
    use(tenant, OCTOBER, (price("10", model="re"), 10**6))
    invoice = invoiced(tenant, OCTOBER)
    rates = tmp_path / "rates.csv"
    rates.write_text("model,tier,component,usd_per_million\nre,standard,uncached,4\n")
    options = ("--from", "2026-10-01", "--to", "2026-11-01", "--reason", "Typing error", "--json")
    (row,) = printed(operate("price", "rerate", "--rates", rates, *options))
    assert (row["tenant"], row["invoice"], row["subtotal"], row["difference_usd"]) == (
        *("acme", invoice.number, -600, "-6.00"),
    )
    (draft,) = printed(operate("price", "reratings", "--state", "draft", "--json"))
    refused = CliRunner().invoke(cli.root, ["price", "rerate", str(draft["id"]), "--apply"])
    assert (refused.exit_code, "someone other" in refused.output) == (1, True)
    with all_tenants_scope(BypassReason.COMMAND):
        Rerating.objects.update(created_by=User.objects.create_superuser("author@op.example"))
    operate("price", "rerate", draft["id"], "--apply")
    assert len(continue_reratings().issued) == 1
    assert "CN-2026-000001" in operate("price", "rerate", draft["id"]).stdout
    other = printed(operate("price", "rerate", "--rates", rates, *options))
    assert other == []
    (draft,) = printed(operate("price", "reratings", "--state", "draft", "--json"))
    operate("price", "rerate", draft["id"], "--discard")


def test_costs(operate, furnished_acme, tmp_path: Path):
    from millrace.apps.deployments.models import Deployment
    from tests.support.billing.execution_costs import FULL, settle_all
    from tests.support.billing.usage_events import make_event
    from tests.support.rows import unscoped

    unscoped(Deployment).create(name="smollm2-135m", source="embedded", pools={"default": 0}, state="drained")
    public = tmp_path / "prices.json.gz"
    prices = {"input_cost_per_token": 1e-6, "output_cost_per_token": 5e-6, "cache_read_input_token_cost": 1e-7}
    public.write_bytes(gzip.compress(json.dumps({"smollm2-135m": prices, "other": prices}).encode()))
    preview = operate("costs", "import", public, "--dry-run")
    assert "smollm2-135m" in preview.stdout
    assert "other" not in preview.stdout
    assert operate("costs").stdout == f"No cost cards. Import them with `{format_command('costs import')}`.\n"
    operate("costs", "import", public, "--note", "public file")
    assert operate("costs", "import", public).stdout == "No changes.\n"
    operate("costs", "import", public, "--model", "mine=other")
    assert "5.00" in operate("costs", "show", "mine").stdout
    now = datetime.now(UTC)  # not before the cost card
    settle_all(
        make_event(
            at=now,
            usage_source="upstream",
            request_id="req_1",
            tenant_id=furnished_acme.tenant.pk,
            price_version=rate_card(),
            **FULL,
        )
    )
    lines = operate("margin").stdout.splitlines()
    assert lines[1].split()[1:3] == ["acme", "smollm2-135m"]
    assert lines[1].split()[-4:-1] == lines[2].split()[-4:-1] == ["$0.006", "$0.002", "$0.004"]
    assert printed(operate("margin", "--group-by", "model", "--json"))["rows"][0]["margin_usd"] == "0.004"
    assert "0.004" in operate("costs", "executions", "--request", "req_1").stdout
    assert "none" in operate("costs", "spend").stdout
    export = tmp_path / "export.csv"
    export.write_text(f"date,model,request_id,prompt_tokens,completion_tokens\n{now:%Y-%m-%d},o,req_1,1000,100\n")
    given = ("reconcile", export, "--model", "smollm2-135m=o")
    assert "--apply" in operate(*given).stderr
    (day, request) = printed(operate(*given, "--apply", "--json"))["differences"]
    assert (request["credit_usd"], request["is_credited"], day["request_id"]) == ("0.0015", True, "")
    assert operate(*given).stdout.splitlines()[2].split()[-1] == "yes"
