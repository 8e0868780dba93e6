"""Deletions of tenants at chosen times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from unittest.mock import patch


@contextmanager
def at_time(moment: datetime) -> Iterator[None]:
    """Let audit entries, and with them the deletion of a tenant, have this time."""
    with patch("django.utils.timezone.now", return_value=moment):
        yield
