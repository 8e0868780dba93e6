"""Actions on billing entities, billing profiles, taxes and exchange rates."""

from __future__ import annotations

from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from billing.currencies.amounts import MAX_TOP_UP_CENTS, MIN_TOP_UP_CENTS
from billing.currencies.stripe_amounts import smallest_charge
from billing.ledger.booking import booking
from billing.models import BillingEntity, BillingProfile, ExchangeRate, Invoice, Party, Period, TaxRule, UsageEvent
from billing.periods import default_entity
from billing.pricing.currencies import currency_of
from billing.taxes import vat_ids
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import FieldRefused, check, insert
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant


def do_set_profile(tenant: Tenant, **fields: Any) -> BillingProfile:
    """Update a tenant's billing profile, for the next invoices. Fields that are not named do not change.

    Raises:
        ActionRefused: a value is not valid, such as a VAT ID that is none of the country.
    """
    with booking(tenant.pk) as locked:
        row = BillingProfile.objects.for_tenant(locked).select_related("entity").first()
        before = None if row is None else audit.serialize_for_audit(row)
        if row is None:
            entity = default_entity()
            row = BillingProfile(tenant=locked, entity=entity, name=locked.name, country=entity.country)
        _change(row, fields)
        _check_top_up(row)
        audit.record(
            "billing_profile.updated", row, tenant_id=locked.pk, before=before, after=audit.serialize_for_audit(row)
        )
    return row


def do_set_prepaid(tenant: Tenant, *, is_prepaid: bool) -> BillingProfile:
    """Start or stop limiting a tenant's requests to its balance, as by a hard budget. Only for operators."""
    return do_set_profile(tenant, is_prepaid=is_prepaid)


def do_assign_entity(tenant: Tenant, entity: BillingEntity) -> BillingProfile:
    """Assign another billing entity to the tenant.

    Raises:
        Conflict: it has usage or invoices, which belong to the periods of the one it has.
    """
    profile = do_set_profile(tenant)
    with booking(tenant.pk) as locked:
        if profile.entity_id == entity.pk:
            return profile
        if UsageEvent.objects.for_tenant(locked).exists() or Invoice.objects.for_tenant(locked).exists():
            raise Conflict(Text("The tenant has usage, which its billing entity bills. The entity cannot be changed."))
        profile.entity = entity
        profile.save(update_fields=["entity"])
        audit.record("billing_profile.entity_changed", profile, tenant_id=locked.pk, after={"entity": entity.slug})
    return profile


def do_add_entity(**fields: Any) -> BillingEntity:
    """Create a billing entity.

    Raises:
        ActionRefused: its slug is taken, or a value is not valid.
    """
    entity = BillingEntity(**_sort_days(fields))
    _check_zone(entity.time_zone)
    _check_vat_id(entity)
    with all_tenants_scope(BypassReason.BILLING):
        insert(entity, Text("An entity with the slug %(slug)s already exists.", slug=repr(entity.slug)))
        audit.record("billing_entity.created", entity, tenant_id=None, after=audit.serialize_for_audit(entity))
    return entity


def do_change_entity(entity: BillingEntity, **fields: Any) -> BillingEntity:
    """Update a billing entity, for the next invoices. Days of reminders and suspensions apply to open invoices, too.

    Raises:
        Conflict: the time zone, once there are periods: they are months by its clocks.
    """
    with all_tenants_scope(BypassReason.BILLING):
        row = BillingEntity.objects.select_for_update().get(pk=entity.pk)
        zone = fields.get("time_zone", row.time_zone)
        _check_zone(zone)
        if zone != row.time_zone and Period.objects.filter(entity=row).exists():
            raise Conflict(Text("The entity has billing periods in its time zone. Create another entity instead."))
        before = audit.serialize_for_audit(row)
        _change(row, _sort_days(fields))
        audit.record("billing_entity.updated", row, tenant_id=None, before=before, after=audit.serialize_for_audit(row))
    return row


def do_add_tax_rule(**fields: Any) -> TaxRule:
    """Create a tax rule for invoices of periods that end from `starts_on` on.

    Raises:
        ActionRefused: a rate without need or need without a rate. Conflict: there is one for the same.
    """
    rule = TaxRule(**fields)
    if (rule.category == "S") != (rule.rate_ppm > 0):
        raise ActionRefused(Text("rate_ppm must be positive for category S, and 0 for the others."))
    with all_tenants_scope(BypassReason.BILLING):
        insert(rule, Text("There is a rule for the same buyers from that day on."))
        audit.record("tax_rule.created", rule, tenant_id=None, after=audit.serialize_for_audit(rule))
    return rule


def do_add_exchange_rate(**fields: Any) -> ExchangeRate:
    """Set the exchange rate from a day on, for invoices issued from then on.

    Raises:
        ActionRefused: it is worth nothing. Conflict: that day has one.
    """
    rate = ExchangeRate(**fields)
    if rate.micro_per_usd <= 0:
        raise ActionRefused(Text("micro_per_usd must be greater than zero."))
    with all_tenants_scope(BypassReason.BILLING):
        insert(rate, Text("There is a rate of that day."))
        shown = {"currency": rate.currency, "on": rate.on.isoformat(), "micro_per_usd": rate.micro_per_usd}
        audit.record("exchange_rate.created", rate, tenant_id=None, after=shown)
    return rate


def _check_top_up(profile: BillingProfile) -> None:
    below, cents = profile.top_up_below, profile.top_up_cents
    if (below is None) != (cents is None):
        raise FieldRefused(
            "top_up_cents", "incomplete", Text("Set top_up_below and top_up_cents together, or neither.")
        )
    if cents is not None and not MIN_TOP_UP_CENTS <= cents <= MAX_TOP_UP_CENTS:
        raise FieldRefused(
            "top_up_cents",
            "range",
            Text(
                "Use an amount from %(min_top_up_cents)s to %(max_top_up_cents)s cents.",
                min_top_up_cents=MIN_TOP_UP_CENTS,
                max_top_up_cents=MAX_TOP_UP_CENTS,
            ),
        )
    step = smallest_charge(currency_of(profile.tenant_id))
    if cents is not None and cents % step:
        raise FieldRefused(
            "top_up_cents",
            "multiple",
            Text("Use a multiple of %(step)s: the payment provider rounds to it.", step=step),
        )
    if below is not None and not 0 < below <= MAX_TOP_UP_CENTS:
        raise FieldRefused(
            "top_up_below",
            "range",
            Text("Use an amount from 1 to %(max_top_up_cents)s cents.", max_top_up_cents=MAX_TOP_UP_CENTS),
        )
    if cents is not None and not profile.payment_method:
        message = Text("No payment method is saved. Top up once with save_method first.")
        raise FieldRefused("top_up_cents", "no_payment_method", message)


def _change(row: Party, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        setattr(row, name, value)
    check(row)
    if {"country", "vat_id"} & fields.keys():
        _check_vat_id(row)
    row.save()


def _sort_days(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an entity with the days of reminders in their order, each once."""
    return fields | ({"reminder_days": sorted(set(fields["reminder_days"]))} if "reminder_days" in fields else {})


def _check_vat_id(party: Party) -> None:
    if party.vat_id and not vat_ids.is_valid(party.country, party.vat_id):
        message = Text(
            "%(vat_id)s is not a VAT ID of %(country)s. Check the number, or leave the field empty.",
            vat_id=repr(party.vat_id),
            country=party.country,
        )
        raise FieldRefused("vat_id", "invalid", message)


def _check_zone(name: str) -> None:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise ActionRefused(
            Text("time_zone: %(name)s is unknown. Use an IANA name, such as Europe/Berlin.", name=repr(name))
        ) from exc
