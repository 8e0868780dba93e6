"""Files of a month of usage: its events and their adjustments as compressed CSV, and a manifest that vouches for them.

`usage-2026-08.json` is written last, so a folder that has it has the rest. It names the files, and says of each its
columns, its rows, the sums of its counts (as text: femto-USD are more than many JSON readers' numbers can hold) and the
SHA-256 of the CSV. An empty field is NULL; an empty text is `""`. Rows are in the order of their key and times in UTC,
so the same rows are the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from billing.metering.partitions import partition_name, shifted
from billing.models import TOKEN_CLASSES, Adjustment, UsageArchive, UsageEvent
from billing.models.usage import ANSWER_HITS
from tenants import csv_tables
from tenants.actions import Conflict

FORMAT = "millrace-usage-1"
SUMS = (*TOKEN_CLASSES, *ANSWER_HITS, "cost_femto", "saved_femto")
_CHUNK = 1 << 20


def require_usage(period_id: int) -> None:
    """See that a period's usage is there. NOTE: call it after reading: what is detached by then was not read.

    Raises:
        Conflict: some is archived.
    """
    rows = UsageArchive.objects.filter(periods__contains=[period_id], restored_at__isnull=True).order_by("month")
    if months := ", ".join(map(str, rows)):
        raise Conflict(f"Usage of {months} is archived. An operator can restore it.")


class ArchiveDamagedError(Exception):
    """A file is not what its manifest says."""


class Part(msgspec.Struct, frozen=True):
    """One file."""

    file: str
    columns: list[str]
    rows: int
    sums: dict[str, str]
    sha256: str  # of the CSV, heading included


class Manifest(msgspec.Struct, frozen=True):
    """What was written of a month."""

    format: str
    month: str  # 2026-08
    usage: Part
    adjustments: Part

    @property
    def first_day(self) -> date:
        return date.fromisoformat(f"{self.month}-01")


def manifest_path(folder: Path, month: date) -> Path:
    return folder / f"usage-{month:%Y-%m}.json"


def write(cursor: Any, month: date, folder: Path) -> Manifest:
    """Write the month's files and read them back. `cursor` sees all rows; files that are there are replaced.

    Raises:
        ArchiveDamagedError: the disk gives back something else.
    """
    manifest = Manifest(
        format=FORMAT,
        month=f"{month:%Y-%m}",
        usage=_write_part(cursor, events_of(month), _columns(UsageEvent), folder, f"usage-{month:%Y-%m}.csv.gz"),
        adjustments=_write_part(
            cursor, adjustments_of(month), _columns(Adjustment), folder, f"usage-{month:%Y-%m}-adjustments.csv.gz"
        ),
    )
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    _replace(manifest_path(folder, month), lambda path: path.write_bytes(encoded + b"\n"))
    return manifest


def read(path: Path) -> Manifest:
    """Read the manifest at that path and verify its files.

    Raises:
        ArchiveDamagedError: they are not, or one is missing.
    """
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        if manifest.format != FORMAT:
            raise ArchiveDamagedError(f"{path.name} is of the format {manifest.format!r}, not {FORMAT!r}.")
        for part, model in ((manifest.usage, UsageEvent), (manifest.adjustments, Adjustment)):
            if unknown := set(part.columns) - set(_columns(model)):
                raise ArchiveDamagedError(f"{part.file} has columns unknown here: {', '.join(sorted(unknown))}.")
            if _read_part(path.parent / part.file, part.columns) != part:
                raise ArchiveDamagedError(f"{part.file} is not what {path.name} says.")
    except (OSError, EOFError, zlib.error, ValueError, csv_tables.Error) as exc:
        raise ArchiveDamagedError(f"{path.name}: {exc}") from exc
    return manifest


def contents(path: Path) -> Iterator[bytes]:
    """Yield a part's CSV, in pieces."""
    with gzip.open(path, "rb") as file:
        while piece := file.read(_CHUNK):
            yield piece


def events_of(month: date) -> str:
    """Return a table of the month's events."""
    return partition_name(month)


def adjustments_of(month: date) -> str:
    """Return a relation of what corrects the month's events."""
    first, after = (f"'{day:%Y-%m-%d} 00:00:00+00'" for day in (month, shifted(month, 1)))
    return f"(SELECT * FROM billing_adjustment WHERE admitted_at >= {first} AND admitted_at < {after}) AS adjustment"  # noqa: S608  (dates)


def summed(cursor: Any, relation: str) -> tuple[int, dict[str, str]]:
    """Rows and sums of what is in the database, as a part has them."""
    cursor.execute(f"SELECT count(*), {', '.join(f'coalesce(sum({name}), 0)::text' for name in SUMS)} FROM {relation}")  # noqa: S608
    rows, *sums = cursor.fetchone()
    return rows, dict(zip(SUMS, sums, strict=True))


def digest(cursor: Any, relation: str, columns: list[str]) -> str:
    """Return the SHA-256 of rows in the database, written as a part is."""
    hashed = hashlib.sha256()
    for piece in _copied(cursor, relation, columns):
        hashed.update(piece)
    return hashed.hexdigest()


def _columns(model: type[UsageEvent | Adjustment]) -> list[str]:
    return [field.attname for field in model._meta.concrete_fields]


def _copied(cursor: Any, relation: str, columns: list[str]) -> Iterator[bytes]:
    order = ", ".join(name for name in ("admitted_at", "request_id", "execution", "outcome") if name in columns)
    query = f"SELECT {', '.join(columns)} FROM {relation} ORDER BY {order}"  # noqa: S608  (names of ours)
    cursor.execute("SET LOCAL TimeZone = 'UTC'; SET LOCAL DateStyle = 'ISO, YMD'")
    with cursor.copy(f"COPY ({query}) TO STDOUT (FORMAT csv, HEADER)") as copy:
        for piece in copy:
            yield bytes(piece)


def _write_part(cursor: Any, relation: str, columns: list[str], folder: Path, name: str) -> Part:
    written = hashlib.sha256()

    def fill(path: Path) -> None:
        # NOTE: neither name nor time in the file's head, so that the same rows make the same file.
        with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            for piece in _copied(cursor, relation, columns):
                written.update(piece)
                file.write(piece)

    _replace(folder / name, fill)
    part = _read_part(folder / name, columns)
    if part.sha256 != written.hexdigest():
        raise ArchiveDamagedError(f"{name} came back otherwise than it was written.")
    return part


def _read_part(path: Path, columns: list[str]) -> Part:
    """Return what a file holds, by reading it whole."""
    hashed, rows, sums = hashlib.sha256(), 0, [0] * len(SUMS)
    reader = csv_tables.read_rows(_lines(path, hashed))
    if (heading := next(reader, None)) != columns:
        raise ArchiveDamagedError(f"{path.name} has the columns {heading}, not {columns}.")
    places = [columns.index(name) for name in SUMS]
    for row in reader:
        rows += 1
        if len(row) != len(columns):
            raise ArchiveDamagedError(f"{path.name} has {len(row)} fields in row {rows}, not {len(columns)}.")
        for index, place in enumerate(places):
            sums[index] += int(row[place])
    totals = {name: str(total) for name, total in zip(SUMS, sums, strict=True)}
    return Part(path.name, columns, rows, totals, hashed.hexdigest())


def _lines(path: Path, hashed: Any) -> Iterator[str]:
    with gzip.open(path, "rb") as file:
        for line in file:
            hashed.update(line)
            yield line.decode()


def _replace(path: Path, fill: Callable[[Path], object]) -> None:
    """Fill a file beside it and put that in its place once it is on the disk."""
    part = path.with_name(f"{path.name}.part")
    fill(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
