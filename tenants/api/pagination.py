"""Pagination of the management API."""

from __future__ import annotations

from typing import Any

from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.pagination import Cursor, CursorPagination
from rest_framework.request import Request


class NewestFirst(CursorPagination):
    """Cursor pagination, newest first. The client may choose the page size up to a maximum."""

    ordering = "-id"
    page_size = 50
    page_size_query_param = "limit"
    max_page_size = 200

    def get_paginated_response_schema(self, schema: Any) -> dict[str, Any]:
        """Return the schema of a page in OpenAPI 3.1."""
        link = {"type": ["string", "null"], "format": "uri"}
        return {
            "type": "object",
            "properties": {"next": link, "previous": link, "results": schema},
            "required": ["next", "previous", "results"],
        }

    def decode_cursor(self, request: Request) -> Cursor | None:
        """Return the decoded cursor.

        Raises:
            ValidationError: the cursor is not valid.
        """
        try:
            cursor = super().decode_cursor(request)
            if cursor and cursor.position is not None:
                self.check_position(str(cursor.position))
        except (NotFound, ValueError) as exc:
            raise ValidationError({"cursor": ["Send a cursor from a `next` or `previous` link."]}) from exc
        return cursor

    def check_position(self, position: str) -> None:
        """Check the position of a cursor.

        Raises:
            ValueError: the position is not a value of the sorted field.
        """
        int(position)
