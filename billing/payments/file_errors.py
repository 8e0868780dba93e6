"""The error of a file of payments that is refused as a whole."""

from __future__ import annotations

from tenants.actions.common import FieldRefused


class FileRefused(FieldRefused):
    """An error in a line of a file. Nothing of the file is booked."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__("content", "file", message)
        self.line = line
