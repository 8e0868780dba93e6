"""Files of a month of usage: its events and adjustments as compressed CSV, and a manifest.

`usage-2026-08.json` is written last, so a directory that contains it is complete. It contains for each file its name,
columns, rows, the sums of its counts (as text, because femto-USD exceed the numbers of many JSON parsers) and the
SHA-256 of the CSV. An empty field is NULL; an empty text is `""`. Rows are in the order of their key and times in UTC,
so the same rows give the same bytes.
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

from billing.metering.partitions import partition_name, shift_month
from billing.models import Adjustment, UsageArchive, UsageEvent
from inference_worker.contract.host import host_name
from inference_worker.contract.request import TOKEN_COLUMNS
from inference_worker.contract.texts import Text
from tenants import csv_tables
from tenants.actions import Conflict

FORMAT = "millrace-usage-1"
SUMS = (*TOKEN_COLUMNS, "cost_femto", "saved_femto")
_CHUNK = 1 << 20


def require_usage(period_id: int) -> None:
    """Raise if usage of a period is archived. NOTE: call it after reading, because events may be detached while
    reading.

    Raises:
        Conflict: some is archived.
    """
    rows = UsageArchive.objects.filter(periods__contains=[period_id], restored_at__isnull=True).order_by("month")
    if months := ", ".join(map(str, rows)):
        raise Conflict(Text("Usage of %(months)s is archived. An operator can restore it.", months=months))


class ArchiveDamagedError(Exception):
    """A file does not match its manifest."""


class Part(msgspec.Struct, frozen=True):
    """A file of an archive, as described in the manifest."""

    file: str
    columns: list[str]
    rows: int
    sums: dict[str, str]
    sha256: str  # hash of the CSV with its header


class Manifest(msgspec.Struct, frozen=True):
    """The manifest of an archived month."""

    format: str
    month: str  # 2026-08
    usage: Part
    adjustments: Part
    host: str = ""  # machine that wrote the files; empty: an earlier release

    @property
    def first_day(self) -> date:
        return date.fromisoformat(f"{self.month}-01")


def manifest_path(directory: Path, month: date) -> Path:
    return directory / f"usage-{month:%Y-%m}.json"


def write(cursor: Any, month: date, directory: Path) -> Manifest:
    """Write the month's files and verify them by reading. `cursor` must see all rows. Existing files are replaced.

    Raises: ArchiveDamagedError if the files read back differ.
    """
    manifest = Manifest(
        format=FORMAT,
        month=f"{month:%Y-%m}",
        usage=_write_part(cursor, events_of(month), _columns(UsageEvent), directory, f"usage-{month:%Y-%m}.csv.gz"),
        adjustments=_write_part(
            cursor, adjustments_of(month), _columns(Adjustment), directory, f"usage-{month:%Y-%m}-adjustments.csv.gz"
        ),
        host=host_name(),
    )
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    _replace(manifest_path(directory, month), lambda path: path.write_bytes(encoded + b"\n"))
    return manifest


def read(path: Path) -> Manifest:
    """Read the manifest at that path and verify its files.

    Raises: ArchiveDamagedError if a file differs or is missing.
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
    """Yield the CSV of a part, in chunks."""
    with gzip.open(path, "rb") as file:
        while piece := file.read(_CHUNK):
            yield piece


def events_of(month: date) -> str:
    """Return a table of the month's events."""
    return partition_name(month)


def adjustments_of(month: date) -> str:
    """Return a relation of the adjustments of the month's events."""
    first, after = (f"'{day:%Y-%m-%d} 00:00:00+00'" for day in (month, shift_month(month, 1)))
    return f"(SELECT * FROM billing_adjustment WHERE admitted_at >= {first} AND admitted_at < {after}) AS adjustment"  # noqa: S608  (dates)


def sum_relation(cursor: Any, relation: str) -> tuple[int, dict[str, str]]:
    """Return the rows and sums in the database, in the form of a part."""
    cursor.execute(f"SELECT count(*), {', '.join(f'coalesce(sum({name}), 0)::text' for name in SUMS)} FROM {relation}")  # noqa: S608
    rows, *sums = cursor.fetchone()
    return rows, dict(zip(SUMS, sums, strict=True))


def digest(cursor: Any, relation: str, columns: list[str]) -> str:
    """Return the SHA-256 of rows in the database, encoded like a part."""
    hashed = hashlib.sha256()
    for piece in _copy_rows(cursor, relation, columns):
        hashed.update(piece)
    return hashed.hexdigest()


def _columns(model: type[UsageEvent | Adjustment]) -> list[str]:
    return [field.attname for field in model._meta.concrete_fields]


def _copy_rows(cursor: Any, relation: str, columns: list[str]) -> Iterator[bytes]:
    order = ", ".join(name for name in ("admitted_at", "request_id", "execution", "outcome") if name in columns)
    query = f"SELECT {', '.join(columns)} FROM {relation} ORDER BY {order}"  # noqa: S608  (names of ours)
    cursor.execute("SET LOCAL TimeZone = 'UTC'; SET LOCAL DateStyle = 'ISO, YMD'")
    with cursor.copy(f"COPY ({query}) TO STDOUT (FORMAT csv, HEADER)") as copy:
        for piece in copy:
            yield bytes(piece)


def _write_part(cursor: Any, relation: str, columns: list[str], directory: Path, name: str) -> Part:
    written = hashlib.sha256()

    def fill(path: Path) -> None:
        # NOTE: the gzip header has no name and no time, so that the same rows give the same file.
        with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            for piece in _copy_rows(cursor, relation, columns):
                written.update(piece)
                file.write(piece)

    _replace(directory / name, fill)
    part = _read_part(directory / name, columns)
    if part.sha256 != written.hexdigest():
        raise ArchiveDamagedError(f"{name} came back otherwise than it was written.")
    return part


def _read_part(path: Path, columns: list[str]) -> Part:
    """Read a file completely and return its description."""
    hashed, rows = hashlib.sha256(), 0
    reader = csv_tables.read_rows(_lines(path, hashed))
    if (heading := next(reader, None)) != columns:
        raise ArchiveDamagedError(f"{path.name} has the columns {heading}, not {columns}.")
    names = [name for name in SUMS if name in columns]  # files of earlier releases have fewer
    places = [columns.index(name) for name in names]
    sums = [0] * len(names)
    for row in reader:
        rows += 1
        if len(row) != len(columns):
            raise ArchiveDamagedError(f"{path.name} has {len(row)} fields in row {rows}, not {len(columns)}.")
        for index, place in enumerate(places):
            sums[index] += int(row[place])
    totals = {name: str(total) for name, total in zip(names, sums, strict=True)}
    return Part(path.name, columns, rows, totals, hashed.hexdigest())


def _lines(path: Path, hashed: Any) -> Iterator[str]:
    with gzip.open(path, "rb") as file:
        for line in file:
            hashed.update(line)
            yield line.decode()


def _replace(path: Path, fill: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it to the path after it was synced."""
    part = path.with_name(f"{path.name}.part")
    fill(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
