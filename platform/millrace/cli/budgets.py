"""`millrace budgets` and `limits`: the limits of spending and of rates of a tenant."""

from __future__ import annotations

from typing import Any

import click

from millrace.cli.app import ResourceGroup, Session, command, given_options
from millrace.cli.output import Column, moment, nano_amount, number, parse_amount, parse_tenant_amount, yes_no

UNITS = click.Choice(["money", "tokens", "requests"])
PERIODS = click.Choice(["day", "month", "lifetime"])
MODES = click.Choice(["hard", "soft", "dry_run"])
LIMITS = {  # option -> field of the API
    "--requests-per-minute": "requests_per_minute",
    "--requests-per-day": "requests_per_day",
    "--tokens-per-minute": "tokens_per_minute",
    "--tokens-per-day": "tokens_per_day",
    "--input-tokens-per-minute": "input_tokens_per_minute",
    "--input-tokens-per-day": "input_tokens_per_day",
    "--output-tokens-per-minute": "output_tokens_per_minute",
    "--output-tokens-per-day": "output_tokens_per_day",
    "--concurrency": "concurrency",
    "--max-prompt-tokens": "max_prompt_tokens",
    "--max-output-tokens": "max_output_tokens",
}


def _amount(value: int, unit: str) -> str:
    return nano_amount(value) if unit == "money" else f"{number(value)} {unit}"


def _of_period(name: str) -> Any:
    """Return a function that formats an amount of a budget's current period."""
    return lambda row: _amount((row["budget_period"] or {}).get(name, 0), row["unit"])


def _scope(row: Any) -> str:
    for name in ("project", "key", "member"):
        if row.get(f"{name}_id"):
            return f"{name} {row[f'{name}_id']}"
    return "tenant"


_BUDGET = [
    Column("id", "id", right=True),
    Column("name", "name"),
    Column("applies to", _scope),
    Column("limit", lambda row: _amount(row["amount"], row["unit"]), right=True),
    Column("period", "period"),
    Column("used", _of_period("used"), right=True),
    Column("reserved", _of_period("reserved"), right=True),
    Column("mode", "mode"),
    Column("active", "active", yes_no),
]
_BUDGET_FIELDS = [
    *_BUDGET[:-2],
    Column("left", lambda row: row["budget_period"] and _amount(row["budget_period"]["left"], row["unit"])),
    Column("rejected", lambda row: (row["budget_period"] or {}).get("rejected", 0)),
    Column("alerts at", lambda row: ", ".join(f"{percent}%" for percent in row["thresholds"])),
    *_BUDGET[-2:],
    Column("created", "created_at", moment),
]
_FORECAST = [
    Column("forecast", "point", nano_amount),
    Column("low", "low", nano_amount),
    Column("high", "high", nano_amount),
]
_ALERT = [
    Column("budget", "budget_name"),
    Column("threshold", lambda row: row["threshold"] if row["threshold"] == "forecast" else f"{row['threshold']}%"),
    Column("used", lambda row: _amount(row["used"], row["unit"]), right=True),
    Column("limit", lambda row: _amount(row["limit"], row["unit"]), right=True),
    Column("reached", "created_at", moment),
]
_LIMIT = [
    Column("id", "id", right=True),
    Column("applies to", _scope),
    Column("model", "model", lambda model: model or "all"),
    Column("limits", lambda row: ", ".join(f"{f}={row[f]}" for f in LIMITS.values() if row[f] is not None)),
    Column("dry run", "dry_run", yes_no),
    Column("set by operator", "set_by_operator", yes_no),
]


@click.group(cls=ResourceGroup)
def budgets() -> None:
    """Manage budgets of money, tokens and requests."""


@command(budgets, "list", example="millrace budgets list --unit money", rows=True)
@click.option("--unit", type=UNITS, help="Only budgets of this unit.")
@click.option("--project", type=int, metavar="ID", help="Only budgets of this project.")
@click.option("--key", type=int, metavar="ID", help="Only budgets of this API key.")
@click.option("--active/--inactive", default=None, help="Only active budgets, or only inactive ones.")
def list_budgets(session: Session, limit: int, **filters: Any) -> None:
    """List budgets with the used and reserved amounts of their current periods."""
    session.rows(session.client.budgets.list(**given_options(filters)), _BUDGET, limit=limit, empty="No budgets.")


@command(budgets, "show", example="millrace budgets show 3")
@click.argument("id", type=int)
def show_budget(session: Session, id: int) -> None:
    """Show a budget."""
    session.one(session.client.budgets.get(id), _BUDGET_FIELDS)


@command(budgets, "create", example='millrace budgets create "CI" --amount 50 --period month --key 12 --threshold 80')
@click.argument("name")
@click.option("--amount", required=True, metavar="N", help="Limit of each period: money, such as 12.50, or a number.")
@click.option("--unit", type=UNITS, default="money", show_default=True, help="What is counted.")
@click.option("--period", type=PERIODS, default="month", show_default=True, help="When the count starts again.")
@click.option("--mode", type=MODES, help="hard rejects, soft counts, dry_run counts what it would reject.")
@click.option("--project", "project_id", type=int, metavar="ID", help="Only for this project.")
@click.option("--key", "key_id", type=int, metavar="ID", help="Only for this API key.")
@click.option("--member", "member_id", type=int, metavar="ID", help="Only for the keys of this member.")
@click.option("--threshold", "thresholds", type=int, multiple=True, metavar="PERCENT", help="Alert at; repeat.")
def create_budget(session: Session, amount: str, unit: Any, **fields: Any) -> None:
    """Create a budget of the tenant, a project, an API key or a member."""
    given = given_options(fields)
    budget = session.client.budgets.create(amount=_parse(amount, unit), unit=unit, **given)
    session.done(
        budget, f"Created the budget {budget['id']}: {_amount(budget['amount'], unit)} per {budget['period']}."
    )


@command(budgets, "update", example="millrace budgets update 3 --amount 75")
@click.argument("id", type=int)
@click.option("--name", help="New name.")
@click.option("--amount", metavar="N", help="New limit: money, such as 12.50, or a number of tokens or requests.")
@click.option("--mode", type=MODES, help="hard rejects, soft counts, dry_run counts what it would reject.")
@click.option("--threshold", "thresholds", type=int, multiple=True, metavar="PERCENT", help="Alert at; repeat.")
def update_budget(session: Session, id: int, amount: str | None, **fields: Any) -> None:
    """Change a budget, including its current period."""
    given = given_options(fields)
    if amount is not None:
        given["amount"] = _parse(amount, session.client.budgets.get(id)["unit"])
    if not given:
        raise click.UsageError("Give at least one option to change.")
    budget = session.client.budgets.update(id, **given)
    session.done(budget, f"Changed the budget {id}: {_amount(budget['amount'], budget['unit'])}.")


@command(budgets, "forecast", example="millrace budgets forecast")
@click.argument("id", type=int, required=False)
def forecast(session: Session, id: int | None) -> None:
    """Show the forecast of this month: of a monthly budget, or of the tenant's cost."""
    if id is None:
        session.one(session.client.forecast.get(), _FORECAST)
        return
    unit = session.client.budgets.get(id)["unit"]
    columns = [Column(each.title, each.value, lambda value: _amount(value, unit)) for each in _FORECAST]
    session.one(session.client.budgets.forecast(id), columns)


@command(budgets, "alerts", example="millrace budgets alerts", rows=True)
def alerts(session: Session, limit: int) -> None:
    """List the thresholds that were reached, newest first."""
    session.rows(session.client.alerts.list(), _ALERT, limit=limit, empty="No alerts.")


def _parse(amount: str, unit: str) -> int:
    """Return an amount in the budget's unit: nano-units of the tenant's currency, tokens or requests."""
    if unit == "money":
        return parse_tenant_amount(amount, unit, "--amount")
    return parse_amount(amount, unit, 1, "--amount")


@click.group(cls=ResourceGroup)
def limits() -> None:
    """Manage rate limits."""


@command(limits, "list", example="millrace limits list --key 12", rows=True)
@click.option("--project", type=int, metavar="ID", help="Only limits of this project.")
@click.option("--key", type=int, metavar="ID", help="Only limits of this API key.")
@click.option("--model", metavar="MODEL", help="Only limits of this model.")
def list_limits(session: Session, limit: int, **filters: Any) -> None:
    """List rate limits, including those of the operator."""
    session.rows(session.client.limits.list(**given_options(filters)), _LIMIT, limit=limit, empty="No rate limits.")


def _limit_options(function: Any) -> Any:
    for option, name in reversed(LIMITS.items()):
        function = click.option(option, name, type=click.IntRange(0), metavar="N", help=f"{option[2:]}.")(function)
    return function


@command(limits, "set", example="millrace limits set --key 12 --requests-per-minute 60 --concurrency 4")
@click.option("--project", "project_id", type=int, metavar="ID", help="Of this project; default: of the tenant.")
@click.option("--key", "key_id", type=int, metavar="ID", help="Of this API key.")
@click.option("--model", metavar="MODEL", help="For this model; default: all models together.")
@click.option("--dry-run", is_flag=True, default=None, help="Reject nothing, count what would be rejected.")
@_limit_options
def set_limits(session: Session, **fields: Any) -> None:
    """Replace the rate limits of the tenant, a project or an API key. Limits that are not given are removed."""
    limits = session.client.limits.set(**given_options(fields))
    session.done(limits, f"Set the rate limits {limits['id']}: {_LIMIT[3].text_of(limits)}.")
