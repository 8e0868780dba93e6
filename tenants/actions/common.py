"""What every verb rests on: one change of a tenant at a time, typed refusals, rows inserted once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction

from tenants.isolation.scopes import tenant_scope
from tenants.models import Tenant


class ActionRefused(Exception):
    """The change cannot be made; the message says why, for the person who asked."""


class FieldRefused(ActionRefused):
    """The value of one field cannot be accepted."""

    def __init__(self, field: str, code: str, message: str) -> None:
        """
        Args:
            field: its name in the API and in forms.
            code: names the reason to programs.
        """
        super().__init__(message)
        self.field = field
        self.code = code


class Conflict(ActionRefused):
    """It cannot be made as things stand: what it needs is taken, gone, or not to be given up."""


@contextmanager
def changing(tenant: Tenant | int) -> Iterator[Tenant]:
    """Open a transaction that changes the tenant, after any other such transaction, and yield its current row.

    So a verb reads what it decides by (roles, versions, snapshots) once, and no two of one tenant wait in a circle.

    Raises:
        Conflict: the tenant is gone.
    """
    with tenant_scope(tenant):
        locked = Tenant.objects.for_tenant(tenant).select_for_update(no_key=True).first()
        if locked is None or locked.status == Tenant.Status.PURGED:
            raise Conflict("This tenant no longer exists.")
        yield locked


def insert(row: models.Model, taken: str) -> None:
    """Save a new row, if its values are right and nobody, even at this instant, has taken its name."""
    check(row)
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as exc:
        raise Conflict(taken) from exc


def check(row: models.Model) -> None:
    """See that the row's values are right, each for itself.

    Raises:
        ActionRefused: naming the fields that are not.
    """
    empty = {field.name for field in row._meta.fields if field.null and getattr(row, field.attname) is None}
    relations = {field.name for field in row._meta.fields if field.is_relation}  # the database sees to those
    try:
        row.clean_fields(exclude=empty | relations)
    except ValidationError as exc:
        texts = (f"{name}: {' '.join(messages)}" for name, messages in exc.message_dict.items())
        raise ActionRefused(" ".join(texts)) from exc
