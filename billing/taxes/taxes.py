"""The tax of an invoice and its amount."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from billing.currencies.amounts import tax
from billing.currencies.iso_codes import EU_COUNTRIES
from billing.models import TaxCategory, TaxRule
from billing.taxes import vat_ids, vies
from inference_worker.contract.texts import Text

_NOTES = {
    TaxCategory.REVERSE_CHARGE: "Reverse charge: the recipient accounts for the tax.",
    TaxCategory.EXEMPT: "Exempt from tax.",
    TaxCategory.EXPORT: "Export outside the seller's tax area.",
    TaxCategory.OUT_OF_SCOPE: "Not subject to tax.",
}
# EN 16931 requires the seller's VAT ID on them (BR-S-02, BR-Z-02, BR-G-02, BR-E-02), also if the only line with the
# category is credit that is deducted (BR-E-03). The tax registration ID, which it allows for S, Z and E, is not stored.
_WITH_SELLER = (TaxCategory.STANDARD, TaxCategory.ZERO, TaxCategory.EXPORT, TaxCategory.EXEMPT)
_OUT_OF_SCOPE = {"category": TaxCategory.OUT_OF_SCOPE.value, "rate_ppm": 0, "label": "Tax"}


class NoTaxRule(Exception):
    """No tax rule of the entity can be applied to the buyer."""


def tax_for(entity_id: int, seller: Mapping[str, Any], buyer: Mapping[str, Any], on: date) -> dict[str, Any]:
    """Return the category, rate and texts of the rule for a buyer on a day. An entity without rules charges no tax.

    A buyer with a valid VAT ID is a business.

    Raises:
        NoTaxRule: no rule matches, or the rule requires a valid VAT ID that a party does not have.
    """
    rules = list(TaxRule.objects.filter(entity_id=entity_id))
    buyer_type = TaxRule.Buyer.BUSINESS if _has_vat_id(buyer) else TaxRule.Buyer.CONSUMER
    fitting = [
        rule
        for rule in rules
        if rule.starts_on <= on
        and (rule.ends_on is None or on <= rule.ends_on)
        and rule.country in ("", buyer["country"])
        and rule.region in ("", buyer["region"])
        and rule.buyer in ("", buyer_type)
    ]
    rule = max(fitting, key=_precision, default=None)
    if rule is not None:
        require_vat_ids(TaxCategory(rule.category), seller, buyer)
        if rule.category == TaxCategory.REVERSE_CHARGE:
            _require_vies(buyer)
        shown = {"category": rule.category, "rate_ppm": rule.rate_ppm, "label": rule.label}
        return {**shown, "note": rule.note or _NOTES.get(TaxCategory(rule.category), "")}
    if rules:
        raise NoTaxRule(
            Text(
                "No tax rule for a %(buyer_type)s in %(country)s on %(on)s.",
                buyer_type=buyer_type.value,
                country=buyer["country"],
                on=on,
            )
        )
    return {**_OUT_OF_SCOPE, "note": _NOTES[TaxCategory.OUT_OF_SCOPE]}


def _has_vat_id(party: Mapping[str, Any]) -> bool:
    return bool(party["vat_id"]) and vat_ids.is_valid(party["country"], party["vat_id"])


def vat_party(party: Mapping[str, Any], billed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return whose VAT ID a note has: that of the party as it is on the invoice, or its current one if that has none.

    A note corrects the tax that the invoice reported under that VAT ID.
    """
    return billed if _has_vat_id(billed) else party


def require_vat_ids(category: TaxCategory, seller: Mapping[str, Any], buyer: Mapping[str, Any]) -> None:
    """Check that the parties have the VAT IDs without which a document of this category is not valid.

    Raises:
        NoTaxRule: one is missing.
    """
    if category == TaxCategory.REVERSE_CHARGE:
        for role, party in ((Text("buyer"), buyer), (Text("billing entity"), seller)):
            if not _has_vat_id(party):
                raise NoTaxRule(
                    Text(
                        "Reverse charge requires a valid VAT ID of the %(role)s. Set it, or change the tax rule.",
                        role=role,
                    )
                )
    elif category in _WITH_SELLER and seller["country"] in EU_COUNTRIES and not _has_vat_id(seller):
        raise NoTaxRule(
            Text(
                "Tax category %(category)s (%(label)s) requires a valid VAT ID of the billing entity. Set it, or change"
                " the tax rule.",
                category=category.value,
                label=category.label,
            )
        )


def _require_vies(buyer: Mapping[str, Any]) -> None:
    if vies.is_enabled() and buyer["country"] in EU_COUNTRIES:
        found = vies.newest_check(buyer["vat_id"])
        if found is None:
            raise NoTaxRule(
                Text(
                    "VIES has not confirmed the VAT ID %(vat_id)s yet. It is checked every hour.",
                    vat_id=buyer["vat_id"],
                )
            )
        if not found.is_valid:
            raise NoTaxRule(
                Text(
                    "VIES reported on %(checked_on)s that the VAT ID %(vat_id)s is not valid. Correct it, or remove it"
                    " to charge tax.",
                    checked_on=f"{found.checked_at:%F}",
                    vat_id=buyer["vat_id"],
                )
            )


def _precision(rule: TaxRule) -> tuple[object, ...]:
    return bool(rule.country), bool(rule.region), bool(rule.buyer), rule.starts_on, rule.pk


def compute_tax(rule: Mapping[str, Any], base: int) -> dict[str, Any]:
    """Return an invoice's tax: the rule, with base and amount in cents."""
    return {**rule, "base": base, "tax": tax(base, rule["rate_ppm"])}
