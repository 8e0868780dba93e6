"""Reversal of all migrations of the apps whose tables depend on tenants' roles and policies."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection

from billing.pricing import rating
from tests.support.rows import allow_emptying

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "owner"])


@pytest.fixture
def restored(as_owner: Any, transactional_db: None) -> Any:
    yield
    call_command("migrate", verbosity=0)
    rating._rate_cards.clear()  # rate cards are numbered from 1 again
    with as_owner(), connection.cursor() as cursor:
        allow_emptying(cursor)


def test_migrations_can_be_reversed(restored: None) -> None:
    for app in ("request_log", "feedback", "operations", "batches", "billing", "tenants"):
        call_command("migrate", app, "zero", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND relname ~ '^(request_log|feedback|operations"
            "|batches|billing|tenants)_'"
        )
        assert cursor.fetchall() == []
