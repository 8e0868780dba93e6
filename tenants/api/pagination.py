"""Pages of the management API."""

from __future__ import annotations

from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.pagination import Cursor, CursorPagination
from rest_framework.request import Request


class NewestFirst(CursorPagination):
    """Cursor pages, newest first; the client may choose their size up to a bound."""

    ordering = "-id"
    page_size = 50
    page_size_query_param = "limit"
    max_page_size = 200

    def decode_cursor(self, request: Request) -> Cursor | None:
        """Return the cursor, if it is one of ours: a made-up one is a bad parameter like any other."""
        try:
            cursor = super().decode_cursor(request)
            if cursor and cursor.position is not None:
                self.check_position(str(cursor.position))
        except (NotFound, ValueError) as exc:
            raise ValidationError({"cursor": ["Give one from a `next` or `previous` link."]}) from exc
        return cursor

    def check_position(self, position: str) -> None:
        """See that a cursor points at a value of what is sorted by.

        Raises:
            ValueError: it does not.
        """
        int(position)
