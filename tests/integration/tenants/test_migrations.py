"""The migrations match the models and can be reversed."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection

from billing.pricing import rating
from tests.support.rows import allow_emptying

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "owner"])
APPS = ("tenants", "billing", "batches", "feedback", "request_log", "experiments", "operations", "alerts")


@pytest.fixture
def restored(as_owner: Any, transactional_db: None) -> Iterator[None]:
    yield
    call_command("migrate", verbosity=0)
    rating._rate_cards.clear()  # rate cards are numbered from 1 again
    with as_owner(), connection.cursor() as cursor:
        allow_emptying(cursor)


def test_migrations_match_the_models() -> None:
    output = StringIO()
    call_command("makemigrations", "--check", "--dry-run", stdout=output)
    assert output.getvalue() == "No changes detected\n"


def test_migrations_can_be_reversed(restored: None) -> None:
    for app in reversed(APPS):
        call_command("migrate", app, "zero", verbosity=0)
    pattern = f"^({'|'.join(APPS)})_"
    with connection.cursor() as cursor:
        for query in (
            "SELECT relname FROM pg_class WHERE relname ~ %s",
            "SELECT proname FROM pg_proc WHERE proname ~ %s",
            "SELECT typname FROM pg_type WHERE typname ~ %s",
        ):
            cursor.execute(query, [pattern])
            assert cursor.fetchall() == [], query
        cursor.execute("SELECT defaclobjtype FROM pg_default_acl")
        assert cursor.fetchall() == []
