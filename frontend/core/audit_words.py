"""The words of audit entries: labels of actions and fields, and their values with units.

Entries contain the values of the database: integers of nano-dollars, IDs and times in UTC.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from billing.currencies.amounts import DEFAULT_CURRENCY
from billing.models import Budget, BudgetPeriod, PriceBookAssignment
from frontend.core.audit_fields import FIELD_LABELS, VALUE_LABELS
from frontend.core.backend_messages import translate_lazily, translate_message
from frontend.core.languages import day_text
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money, exact
from frontend.core.page_context import PageContext
from tenants.models import ApiKey, AuditEntry, Project, User
from tenants.tenant_settings import GROUPS, SETTINGS

NONE = _lazy("none")
OBJECTS = {
    "alert_rule": _lazy("Alert rule"),
    "bank_entry": _lazy("Bank entry"),
    "bank_statement": _lazy("Bank statement"),
    "batch": _lazy("Batch"),
    "billing_entity": _lazy("Billing entity"),
    "billing_profile": _lazy("Billing details"),
    "budget": _lazy("Budget"),
    "budget_alert": _lazy("Budget alert"),
    "channel": _lazy("Alert channel"),
    "chart_of_accounts": _lazy("Chart of accounts"),
    "commitment": _lazy("Commitment"),
    "cost_card": _lazy("Cost card"),
    "credential": _lazy("Credential"),
    "credit": _lazy("Credit"),
    "deployment": _lazy("Deployment"),
    "exchange_rate": _lazy("Exchange rate"),
    "experiment": _lazy("Experiment"),
    "file": _lazy("File"),
    "invitation": _lazy("Invitation"),
    "invoice": _lazy("Invoice"),
    "key": _lazy("API key"),
    "limits": _lazy("Rate limits"),
    "machine_cost": _lazy("Machine cost"),
    "member": _lazy("Member"),
    "metered_usage": _lazy("Metered usage"),
    "one_off_line": _lazy("One-off line"),
    "payment": _lazy("Payment"),
    "payment_event": _lazy("Payment event"),
    "period": _lazy("Billing period"),
    "policy": _lazy("Routing policy"),
    "policy_draft": _lazy("Policy draft"),
    "price_book": _lazy("Price book"),
    "price_term": _lazy("Price term"),
    "price_version": _lazy("Price version"),
    "project": _lazy("Project"),
    "quarantine": _lazy("Quarantined usage"),
    "rule_alert": _lazy("Alert"),
    "tax_rule": _lazy("Tax rule"),
    "tenant": _lazy("Organization"),
    "top_up": _lazy("Top-up"),
    "unsettled_usage": _lazy("Unsettled usage"),
    "user": _lazy("User"),
    "webhook": _lazy("Webhook"),
    "worker": _lazy("Worker"),
}
_VERBS = {
    "accepted": _lazy("accepted"),
    "acknowledged": _lazy("acknowledged"),
    "alert_emails_changed": _lazy("alert emails changed"),
    "api_accessed": _lazy("api accessed"),
    "assigned": _lazy("assigned"),
    "cancelled": _lazy("cancelled"),
    "closed": _lazy("closed"),
    "cordoned": _lazy("cordoned"),
    "created": _lazy("created"),
    "deactivated": _lazy("deactivated"),
    "deleted": _lazy("deleted"),
    "disabled": _lazy("disabled"),
    "discarded": _lazy("discarded"),
    "dismissed": _lazy("dismissed"),
    "drain_started": _lazy("drain started"),
    "ended": _lazy("ended"),
    "entity_changed": _lazy("entity changed"),
    "expired": _lazy("expired"),
    "failed": _lazy("failed"),
    "finalized": _lazy("finalized"),
    "imported": _lazy("imported"),
    "operator_granted": _lazy("operator granted"),
    "operator_revoked": _lazy("operator revoked"),
    "paid": _lazy("paid"),
    "passkey_rejected": _lazy("passkey rejected"),
    "passkey_renamed": _lazy("passkey renamed"),
    "past_due": _lazy("past due"),
    "payment_method_saved": _lazy("payment method saved"),
    "playground_token_created": _lazy("playground token created"),
    "published": _lazy("published"),
    "purged": _lazy("purged"),
    "reactivated": _lazy("reactivated"),
    "recorded": _lazy("recorded"),
    "reencrypted": _lazy("reencrypted"),
    "rehashed": _lazy("rehashed"),
    "removed": _lazy("removed"),
    "renamed": _lazy("renamed"),
    "reopened": _lazy("reopened"),
    "replayed": _lazy("replayed"),
    "restored": _lazy("restored"),
    "resumed": _lazy("resumed"),
    "returned": _lazy("returned"),
    "reversed": _lazy("reversed"),
    "reverted": _lazy("reverted"),
    "revoked": _lazy("revoked"),
    "rotated": _lazy("rotated"),
    "scheduled": _lazy("scheduled"),
    "second_factor_removed": _lazy("second factor removed"),
    "secret_rotated": _lazy("secret rotated"),
    "sessions_ended": _lazy("sessions ended"),
    "started": _lazy("started"),
    "stopped": _lazy("stopped"),
    "superseded": _lazy("superseded"),
    "suspended": _lazy("suspended"),
    "tax_relief_claimed": _lazy("tax relief claimed"),
    "tested": _lazy("tested"),
    "uncordoned": _lazy("uncordoned"),
    "updated": _lazy("updated"),
    "view_ended": _lazy("view ended"),
    "view_started": _lazy("view started"),
    "voided": _lazy("voided"),
    "withdrawn": _lazy("withdrawn"),
    "written_off": _lazy("written off"),
    **{f"{group.name}_updated": translate_lazily(group.audit_verb) for group in GROUPS},
}
_FIELDS = {
    **FIELD_LABELS,
    "user_id": _lazy("User"),
    "member_id": _lazy("Member"),
    "key_id": _lazy("API key"),
    "project_id": _lazy("Project"),
    "tenant_id": _lazy("Tenant"),
    "replaces_id": _lazy("Replaces key"),
    "cents": _lazy("Amount"),
    "nano": _lazy("Amount"),
    "nano_per_hour": _lazy("Cost per hour"),
    "rate_ppm": _lazy("Rate"),
    "fee": _lazy("Monthly fee"),
    "included_nano": _lazy("Included per month"),
    "top_up_cents": _lazy("Top-up amount"),
    "top_up_below": _lazy("Top up below"),
    "daily_spend_limit_nano": _lazy("Daily spend limit"),
    "is_active": _lazy("Active"),
    "is_staff": _lazy("Operator"),
    "is_superuser": _lazy("Superuser"),
    "allowed_ip_ranges": _lazy("Allowed IPs"),
    "allowed_models": _lazy("Allowed models"),
    "cost_center": _lazy("Cost center"),
    "event_types": _lazy("Events"),
    "scopes": _lazy("Permissions"),
    "thresholds": _lazy("Alert at"),
    "alert_forecast": _lazy("Alert on forecast"),
    "alert_emails": _lazy("Alerts by email"),
    "vat_id": _lazy("VAT ID"),
    "po_number": _lazy("PO number"),
    "buyer_reference": _lazy("Buyer reference"),
    "contact_name": _lazy("Contact"),
    "contact_phone": _lazy("Contact’s phone"),
    "iban": "IBAN",
    "bic": "BIC",
    "url": "URL",
    "dry_run": _lazy("Dry run"),
    "why": _lazy("Reason"),
    **{setting.name: translate_lazily(setting.audit_label) for setting in SETTINGS.values() if setting.audit_label},
}
_CENTS = {"cents", "total", "fee", "top_up_cents", "top_up_below"}
_BUDGET_AMOUNTS = {"amount", "rollover_limit", "temporary_increase"}
_REFERENCES: Mapping[str, type[Any]] = {
    **{"key_id": ApiKey, "replaces_id": ApiKey, "project_id": Project},
    **{"user_id": User, "member_id": User},
}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d")
Names = Mapping[tuple[type[Any], int], str]


def action_label(action: str) -> str:
    """Return an action in words: `key.created` is "API key created"."""
    kind, _, verb = action.partition(".")
    return (
        f"{OBJECTS.get(kind, kind.replace('_', ' ').capitalize())} {_VERBS.get(verb, verb.replace('_', ' '))}".strip()
    )


def field_label(field: str) -> str:
    """Return the label of a field."""
    return _FIELDS.get(field) or field.removesuffix("_nano").removesuffix("_id").replace("_", " ").capitalize()


def names_of(ctx: PageContext, rows: Iterable[AuditEntry]) -> Names:
    """Return the names of the objects that the entries refer to by ID. At most one query for each type."""
    wanted: dict[type[Any], set[int]] = {}
    for row in rows:
        for values in (row.before or {}, row.after or {}):
            for field, model in _REFERENCES.items():
                if isinstance(values.get(field), int):
                    wanted.setdefault(model, set()).add(values[field])
    found: dict[tuple[type[Any], int], str] = {}
    for model, ids in wanted.items():
        if model is User:
            named = User.objects.filter(pk__in=ids).values_list("pk", "email")
        else:
            objects = model.objects.all_tenants() if ctx.access is None else model.objects.for_tenant(ctx.tenant)
            named = objects.filter(pk__in=ids).values_list("pk", "name")
        found |= {(model, pk): name for pk, name in named}
    return found


def currencies_of(ctx: PageContext, rows: Iterable[AuditEntry]) -> Mapping[int, str]:
    """Return the currencies of tenants that are not billed in the page's currency, by the tenant's ID."""
    if ctx.access is not None:
        return {}
    ids = {row.tenant_id for row in rows if row.tenant_id is not None}
    books = PriceBookAssignment.objects.all_tenants().filter(tenant_id__in=ids)
    return dict(books.exclude(book__currency=DEFAULT_CURRENCY).values_list("tenant_id", "book__currency"))


def units_of(ctx: PageContext, rows: Iterable[AuditEntry]) -> Mapping[int, str]:
    """Return the unit of each budget whose entry does not contain it, by the budget's ID."""
    ids = [
        row.object_id
        for row in rows
        if row.object_type == "budget" and row.object_id is not None and "unit" not in (row.after or {})
    ]
    if not ids:
        return {}
    budgets = Budget.objects.all_tenants() if ctx.access is None else Budget.objects.for_tenant(ctx.tenant)
    return {pk: unit for pk, unit in budgets.filter(pk__in=ids).values_list("pk", "unit")}


def value_text(field: str, value: Any, names: Names, unit: str = "") -> str:
    """Return the value of a field with its unit, and the name instead of an ID. `unit` is that of a budget."""
    if value is None or value in ([], {}):
        return str(NONE)
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    if field in _REFERENCES and isinstance(value, int):
        return names.get((_REFERENCES[field], value), _("ID %(number)s") % {"number": value})
    if isinstance(value, int):
        return _number(field, value, unit)
    if isinstance(value, str):
        if field in _WORDS:
            return str(VALUE_LABELS.get(value, value.replace("_", " ")))
        return _time(value) if _TIME.match(value) else translate_message(value) if field in _SENTENCES else value
    if isinstance(value, list) and not any(isinstance(part, list | dict) for part in value):
        shown = ", ".join(str(part) for part in value)
        return f"{shown} %" if field == "thresholds" else shown
    return json.dumps(value, ensure_ascii=False)


_WORDS = {
    *("mode", "unit", "period", "grant_type", "state", "status", "invoice_type", "role", "kind", "metric", "component"),
    *("answer_cache_scope", "buyer", "stop_metric", "stop_reason", "unknown_parameters", "voucher_type"),
}
_SENTENCES = {"detail", "disabled_because"}
_UNITS: Mapping[str, Callable[[int], str]] = {
    "nano_per_hour": lambda value: f"{Money.nano(value, DEFAULT_CURRENCY).exact_text}/h",
    "rate_ppm": lambda value: f"{value / 10_000:.4f}".rstrip("0").rstrip(".") + " %",
}


def _number(field: str, value: int, unit: str) -> str:
    if field in _UNITS:
        return _UNITS[field](value)
    if field in _CENTS:
        return Money.cents(value).exact_text
    if field == "nano" or field.endswith("_nano"):
        return Money.nano(value).exact_text
    if field in _BUDGET_AMOUNTS and unit:
        return (
            Money.nano(value).exact_text
            if unit == BudgetPeriod.Unit.MONEY
            else f"{exact(value)} {VALUE_LABELS.get(unit, unit)}"
        )
    if field.endswith("_seconds"):
        return f"{exact(value // 3600)} h" if value and value % 3600 == 0 else f"{exact(value)} s"
    if field.endswith("_days"):
        return ngettext("%(days)s day", "%(days)s days", value) % {"days": exact(value)}
    return exact(value)


def _time(value: str) -> str:
    """Return a time in the user's time zone; the text if it is none."""
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        return value
    if at.tzinfo is None:
        return value
    here = timezone.localtime(at)
    return day_text(here, "j M Y, H:i")
