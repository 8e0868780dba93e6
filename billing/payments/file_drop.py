"""Payments from files in a directory: CSV files, and bank statements in the format camt.053.

The directory is that of the machine whose web jobs run the task. The log names this machine.

Rename a file into the directory, so that it is never read incomplete. What was recorded before is skipped, so a file
may be repeated. Every process that may write to the directory is trusted.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from billing.payments.bank_files import do_import_payments
from billing.payments.camt import MAX_BYTES
from billing.payments.file_errors import FileRefused
from billing.payments.payment_csv import read_payments
from billing.payments.recording import do_record_payment
from inference_worker.contract.host import host_name
from tenants.actions import ActionRefused

log = structlog.get_logger(__name__)


def collect(directory: Path) -> int:
    """Record the payments of the files in `directory`. Return how many were new.

    A file is moved to `done`, or to `failed` with a file of errors. The other rows of a CSV file are recorded. Of a
    bank statement with an error nothing is.
    """
    recorded = 0
    for path in sorted([*directory.glob("*.csv"), *directory.glob("*.xml")]):
        found, errors = _record(path)
        recorded += found
        log.info("payment_file_read", file=path.name, host=host_name(), recorded=found)
        _put_away(path, errors)
    return recorded


def _record(path: Path) -> tuple[int, list[str]]:
    """Record the payments of a file. Return how many were new, and the errors."""
    if path.stat().st_size > MAX_BYTES:
        return 0, [f"The file is larger than {MAX_BYTES // 10**6} MB. Divide it into several files."]
    content = path.read_bytes()
    try:
        if path.suffix == ".xml":
            return do_import_payments(path.name, content).booked, []
        payments = read_payments(content)
    except FileRefused as exc:
        return 0, [f"line {exc.line}: {exc}"]
    except ActionRefused as exc:
        return 0, [str(exc)]
    recorded, errors = 0, []
    for line, received in payments:
        try:
            recorded += do_record_payment(received)[1]
        except ActionRefused as exc:
            errors.append(f"line {line}: {exc}")
    return recorded, errors


def _put_away(path: Path, errors: list[str]) -> None:
    place = path.parent / ("failed" if errors else "done")
    place.mkdir(exist_ok=True)
    if errors:
        (place / f"{path.name}.txt").write_text("\n".join(errors) + "\n", encoding="utf-8")
        log.error("payment_file_rejected", file=path.name, host=host_name(), errors=errors)
    path.replace(place / path.name)
