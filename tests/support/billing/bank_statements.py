"""Bank statements in the format camt.053, in the versions 02 and 08."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from xml.sax.saxutils import escape

from billing.models import BankEntry
from billing.periods import default_entity
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

IBAN = "DE75512108001245126199"
DAY = "2026-11-12"


def account_of_default_entity(iban: str = IBAN) -> None:
    """Give the default billing entity the account of the statements."""
    with all_tenants_scope(BypassReason.BILLING):
        entity = default_entity()
        entity.iban = iban
        entity.save(update_fields=["iban"])


def find_open_entry() -> int:
    """Return the ID of a payment to assign. Without one, import a statement with it."""
    from billing.payments.bank_files import do_import_payments

    with all_tenants_scope(BypassReason.BILLING):
        row = BankEntry.objects.filter(state=BankEntry.State.OPEN).first()
    if row is not None:
        return row.pk
    account_of_default_entity()
    payments = [
        entry("1190.00", "Invoice of October, thank you", payer="Bluefin Analytics GmbH"),
        entry("59.50", "Kundennummer 4711", payer="Nordwind AG"),
    ]
    do_import_payments("statement.xml", statement(*payments, statement_id="DEMO-1"))
    return find_open_entry()


def details(*texts: str, amount: str = "", reference: str = "", creditor: str = "", payer: str = "") -> str:
    """Return the details of an entry: unstructured texts, an amount, a structured reference and the payer."""
    return (
        "<TxDtls>"
        + (f"<Refs><AcctSvcrRef>{reference}</AcctSvcrRef></Refs>" if reference else "")
        + (f'<AMOUNT Ccy="USD">{amount}</AMOUNT>' if amount else "")
        + (f"<RltdPties><Dbtr><PARTY>{escape(payer)}</PARTY></Dbtr></RltdPties>" if payer else "")
        + "<RmtInf>"
        + "".join(f"<Ustrd>{escape(text)}</Ustrd>" for text in texts)
        + (f"<Strd><CdtrRefInf><Ref>{creditor}</Ref></CdtrRefInf></Strd>" if creditor else "")
        + "</RmtInf></TxDtls>"
    )


def entry(
    amount: str,
    *texts: str,
    direction: str = "CRDT",
    status: str = "BOOK",
    reference: str = "",
    reversal: bool = False,
    currency: str = "USD",
    day: str = DAY,
    parts: Sequence[str] = (),
    creditor: str = "",
    payer: str = "",
) -> str:
    """Return an entry with these texts, or with the details of a batch."""
    inside = "".join(parts) or details(*texts, creditor=creditor, payer=payer)
    return (
        f'<Ntry>\n<Amt Ccy="{currency}">{amount}</Amt><CdtDbtInd>{direction}</CdtDbtInd>'
        + ("<RvslInd>true</RvslInd>" if reversal else "")
        + f"<STATUS>{status}</STATUS><BookgDt><Dt>{day}</Dt></BookgDt>"
        + (f"<AcctSvcrRef>{reference}</AcctSvcrRef>" if reference else "")
        + f"<NtryDtls>{inside}</NtryDtls></Ntry>\n"
    )


def _balance(code: str, amount: Decimal, currency: str) -> str:
    direction = "DBIT" if amount < 0 else "CRDT"
    return (
        f'<Bal><Tp><CdOrPrtry><Cd>{code}</Cd></CdOrPrtry></Tp><Amt Ccy="{currency}">{abs(amount)}</Amt>'
        f"<CdtDbtInd>{direction}</CdtDbtInd><Dt><Dt>{DAY}</Dt></Dt></Bal>\n"
    )


def stmt(
    *entries: str,
    statement_id: str = "S-1",
    number: str = "7",
    iban: str = IBAN,
    currency: str = "USD",
    opening: str = "100.00",
    closing: str | None = None,
) -> str:
    """Return a statement. By default its closing balance is the sum of its booked entries."""
    end = Decimal(opening) + sum(map(_sum_entry, entries)) if closing is None else Decimal(closing)
    return (
        f"<Stmt>\n<Id>{statement_id}</Id><ElctrncSeqNb>{number}</ElctrncSeqNb>\n"
        f"<Acct><Id><IBAN>{iban}</IBAN></Id><Ccy>{currency}</Ccy></Acct>\n"
        + _balance("OPBD", Decimal(opening), currency)
        + _balance("CLBD", end, currency)
        + "".join(entries)
        + "</Stmt>"
    )


def _sum_entry(text: str) -> Decimal:
    if "<STATUS>BOOK<" not in text:
        return Decimal()
    amount = Decimal(text.partition('">')[2].partition("<")[0])
    return amount if text.partition("<CdtDbtInd>")[2].startswith("CRDT") else -amount


def document(*statements: str, version: str = "02") -> bytes:
    """Return a file of statements. Versions differ in the status, the parties and the amounts of details."""
    body = "".join(statements)
    if version == "02":
        body = body.replace("<AMOUNT", "<AmtDtls><TxAmt><Amt").replace("</AMOUNT>", "</Amt></TxAmt></AmtDtls>")
        body = body.replace("<PARTY>", "<Nm>").replace("</PARTY>", "</Nm>")
        body = body.replace("<STATUS>", "<Sts>").replace("</STATUS>", "</Sts>")
    else:
        body = body.replace("AMOUNT", "Amt").replace("<PARTY>", "<Pty><Nm>").replace("</PARTY>", "</Nm></Pty>")
        body = body.replace("<STATUS>", "<Sts><Cd>").replace("</STATUS>", "</Cd></Sts>")
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<Document xmlns="urn:iso:std:iso:20022:tech:xsd:camt.053.001.{version}">\n'
        f"<BkToCstmrStmt>\n{body}</BkToCstmrStmt></Document>\n"
    ).encode()


def statement(*entries: str, version: str = "02", **fields: str) -> bytes:
    """Return a file with one statement."""
    return document(stmt(*entries, **fields), version=version)
