"""Validators of texts that documents contain."""

from __future__ import annotations

import re

from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _lazy

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff]")


def check_line(text: str) -> None:
    """Validate a text of one line.

    Raises:
        ValidationError: it has line breaks or control characters, which documents cannot contain.
    """
    if _CONTROL.search(text):
        raise ValidationError(_lazy("Remove line breaks and control characters."), code="control_characters")


def check_lines(text: str) -> None:
    """Validate a text that may have several lines.

    Raises:
        ValidationError: it has control characters, which documents cannot contain.
    """
    for line in text.splitlines():
        check_line(line)
