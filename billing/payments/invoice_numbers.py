"""Numbers of invoices in the texts of bank transfers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from billing.models import CHARGES, BillingEntity, Invoice, NumberSeries

_BETWEEN = r"[\s._/\-]*"


class InvoiceNumbers:
    """The series of some billing entities, whose numbers payers write in capitals or not, and with other separators.

    A number has all its digits: INV-2026-000012, inv 2026/000012 or RF45INV2026000012, but not INV-2026-12.
    """

    def __init__(self, entities: Iterable[BillingEntity]) -> None:
        self._entities = list(entities)
        rows = NumberSeries.objects.filter(entity__in=self._entities).order_by("prefix")
        self._patterns = [
            (prefix, re.compile(_pattern(prefix), re.IGNORECASE))
            for prefix in rows.values_list("prefix", flat=True).distinct()
            if any(map(str.isalnum, prefix))
        ]

    def find(self, texts: Sequence[str]) -> list[str]:
        """Return the numbers in texts, in their order. Banks break long texts, so a number may be on two of them."""
        return self._search(" ".join(texts)) or self._search("".join(texts))

    def find_invoices(self, texts: Sequence[str]) -> list[Invoice]:
        """Return the documents to be paid that the texts name, in their order."""
        numbers = self.find(texts)
        rows = Invoice.objects.all_tenants().filter(
            entity__in=self._entities, number__in=numbers, invoice_type__in=CHARGES
        )
        found = list(rows.select_related("tenant"))
        return sorted(found, key=lambda row: (numbers.index(str(row.number)), row.pk))

    def _search(self, text: str) -> list[str]:
        found = [
            (match.start(), f"{prefix}-{match[1]}-{match[2]}")
            for prefix, pattern in self._patterns
            for match in pattern.finditer(text)
        ]
        return list(dict.fromkeys(number for _, number in sorted(found)))


def _pattern(prefix: str) -> str:
    letters = _BETWEEN.join(re.escape(part) for part in re.split(r"[\W_]+", prefix) if part)
    return rf"(?<![^\W_])(?:RF[0-9]{{2}})?{letters}{_BETWEEN}([0-9]{{4}}){_BETWEEN}([0-9]{{6,9}})(?![0-9])"
