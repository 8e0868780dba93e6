"""Common parts of actions: a lock of the tenant, typed errors, validated inserts, and acknowledged alerts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction

from inference_worker.contract.texts import Text
from tenants import audit
from tenants.isolation.scopes import tenant_scope
from tenants.models import Tenant
from tenants.routing_policies.target_checks import TargetProblem


class ActionRefused(Exception):
    """An error of a change that cannot be made. The message is for the user."""


class FieldRefused(ActionRefused):
    """An error of one field's value."""

    def __init__(self, field: str, code: str, message: str) -> None:
        """
        Args:
            field: the field's name in the API and in forms.
            code: machine-readable reason.
            message: the reason, for the user.
        """
        super().__init__(message)
        self.field = field
        self.code = code


class Conflict(ActionRefused):
    """An error of a change that conflicts with the current state, such as a taken name or a deleted object."""

    code = "conflict"  # machine-readable reason


class VersionConflict(Conflict):
    """An error of a change that is based on a version which another one has replaced."""

    code = "version_conflict"

    def __init__(self, active: int, message: str) -> None:
        """
        Args:
            active: the version that is active now.
            message: the reason, for the user.
        """
        super().__init__(message)
        self.active = active


def refuse_problems(field: str, problems: Iterable[TargetProblem]) -> None:
    """Refuse a change by its first blocking problem.

    Raises:
        FieldRefused: a named model cannot serve the tenant's requests.
    """
    for problem in problems:
        if problem.is_blocking:
            raise FieldRefused(field, problem.obstacle, problem.text)


@contextmanager
def locked_tenant(tenant: Tenant | int) -> Iterator[Tenant]:
    """Open a transaction, lock the tenant and yield its current row.

    Actions of a tenant run one after another. They can therefore read roles, versions and snapshots once, and cannot
    deadlock each other.

    Raises:
        Conflict: the tenant no longer exists.
    """
    with tenant_scope(tenant):
        locked = Tenant.objects.for_tenant(tenant).select_for_update(no_key=True).first()
        if locked is None or locked.status == Tenant.Status.PURGED:
            raise Conflict(Text("This tenant no longer exists."))
        yield locked


def insert(row: models.Model, taken: str) -> None:
    """Validate and save a new row.

    Raises:
        ActionRefused: a value is not valid. Conflict: a unique value is taken; the message is `taken`.
    """
    check(row)
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as exc:
        raise Conflict(taken) from exc


def check(row: models.Model) -> None:
    """Validate each field of the row.

    Raises:
        ActionRefused: the message names the fields that are not valid.
    """
    empty = {field.name for field in row._meta.fields if field.null and getattr(row, field.attname) is None}
    relations = {field.name for field in row._meta.fields if field.is_relation}  # checked by the database
    try:
        row.clean_fields(exclude=empty | relations)
    except ValidationError as exc:
        texts = (f"{name}: {' '.join(messages)}" for name, messages in exc.message_dict.items())
        raise ActionRefused(" ".join(texts)) from exc


def acknowledge(alerts: models.QuerySet[Any], tenant: Tenant, action: str) -> bool:
    """Record that a user has seen the alert that `alerts` selects. Returns False if it was acknowledged before.

    Args:
        tenant: the locked tenant.
        action: of the audit entry.

    Raises:
        Conflict: the alert no longer exists.
    """
    row = alerts.first()
    if row is None:
        raise Conflict(Text("This alert no longer exists."))
    if row.acknowledged_at is not None:
        return False
    before = audit.serialize_for_audit(row)
    row.acknowledged_at, row.acknowledged_by = datetime.now(UTC), audit.current_actor().name[:254]
    row.save(update_fields=["acknowledged_at", "acknowledged_by"])
    audit.record(action, row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
    return True
