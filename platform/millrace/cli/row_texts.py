"""Texts of table columns that the types of the management API do not give, for `plain_commands.toml`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from millrace.cli.output import amount_of, cents, join_values, money, number

Row = Mapping[str, Any]
invoice_total = amount_of("total")
commitment_fee = amount_of("fee")
payment_amount = amount_of("cents")
ledger_difference = amount_of("ledger_difference")


def term_effect(term: Row) -> str:
    """Return what a price term changes."""
    rule, currency = term["rule"], term["currency"]
    if rule["term_type"] == "minimum":
        return f"at least {cents(rule['cents'], currency)} per month"
    if rule["term_type"] == "discount":
        return f"{percent_of_ppm(rule['ppm'])} less for {rule.get('model', 'all models')}"
    tiers = (
        f"from {number(tier['from_tokens'])}: {money(tier['usd_per_million'], currency)}" for tier in rule["tiers"]
    )
    return f"{rule['term_type']}, {rule['model']}, {rule['tier']}, {rule['component']}, {join_values(tiers)}"


def key_state(key: Row) -> str:
    return "active" if key["live"] else "revoked" if key["revoked_at"] else "expired"


def invitation_email(invitation: Row) -> str:
    return str(invitation["delivery_error"] or invitation["delivery_state"])


def last_result(webhook: Row) -> Any:
    return webhook["last_status"] or webhook["last_error"]


def spending_credential(row: Row) -> Any:
    return row["credential_id"] or "none"


def served_model(request: Row) -> Any:
    return request["served_model"] or request["requested_model"]


def lateness(reconciliation: Row) -> str:
    return "yes, none for a quarter of an hour" if reconciliation["is_late"] else "not late"


def quarantined_records(reconciliation: Row) -> str:
    return number(sum(reconciliation["quarantine"].values()))


def count_lines(chart: Row) -> int:
    return len(chart["lines"])


def kv_blocks(replica: Row) -> str:
    return f"{replica['free_blocks']:,} of {replica['total_blocks']:,}"


def activity(is_active: bool) -> str:
    return "active" if is_active else "inactive"


def joined_or_all(values: Iterable[Any]) -> str:
    return join_values(values) or "all"


def problem_texts(problems: Iterable[Row]) -> str:
    """Return models that cannot serve requests, with their places."""
    return " ".join(f"{problem['place']}: {problem['message']}" for problem in problems)


def compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def days(number: int) -> str:
    return f"{number} days"


def percent_of_ppm(ppm: int) -> str:
    return f"{ppm / 10_000:g}%"


def decimal_of_micro(micro: int) -> str:
    return f"{micro // 10**6}.{micro % 10**6:06}"
