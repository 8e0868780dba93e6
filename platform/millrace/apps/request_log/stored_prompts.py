"""Bodies of stored prompts. Only this module reads them from the database, and each read is bounded in rows and bytes.

A body has at most 65,536 characters, but its objects can need 100 times as much memory. So bodies are decoded one after
another, and a caller keeps only what it needs of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from django.db import connection

MAX_READ_BYTES = 8 * 2**20  # bodies that one call reads
MAX_READ_ROWS = 1000
_ROWS_AT_A_TIME = 16
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_BODIES = """
SELECT c.request_id, c.body FROM (
    SELECT request_id, sum(octet_length(body)) OVER (ORDER BY started_at DESC, request_id) AS total
    FROM request_log_requestcontent
    WHERE tenant_id = %(tenant)s AND request_id = ANY(%(ids)s) AND NOT truncated
) sizes JOIN request_log_requestcontent c ON c.tenant_id = %(tenant)s AND c.request_id = sizes.request_id
WHERE total <= %(bytes)s ORDER BY total LIMIT %(rows)s
"""


class StoredBody(NamedTuple):
    """The body of a stored request, as JSON."""

    request_id: str
    text: str


def read_bodies(
    tenant_id: int, request_ids: Sequence[str], max_bytes: int = MAX_READ_BYTES, max_rows: int = MAX_READ_ROWS
) -> Iterator[StoredBody]:
    """Yield the bodies of these requests that were not cut, newest first, within the bounds. The scope must be open."""
    fields: dict[str, Any] = {"tenant": tenant_id, "ids": list(request_ids), "bytes": max_bytes, "rows": max_rows}
    with connection.chunked_cursor() as cursor:
        cursor.execute(_BODIES, fields)
        while rows := cursor.fetchmany(_ROWS_AT_A_TIME):
            yield from map(StoredBody._make, rows)


def decode_body(text: str) -> dict[str, Any] | None:
    """Return the fields of a stored body; None if it is not a JSON object."""
    try:
        return _decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
