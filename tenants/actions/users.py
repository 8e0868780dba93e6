"""Actions on users: access to the platform, operator rights, a lost second factor or password, and a user's own name.

Every action of operators locks the user and all active operators, so actions that run concurrently see each other's
results. Operators cannot act on themselves: a mistake could lock them out.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from allauth.mfa.models import Authenticator
from django.db import transaction
from django.db.models import Q

from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions.common import Conflict
from tenants.models import User
from tenants.outbox import user_emails


def do_deactivate_user(user: User) -> bool:
    """End a user's access: sign-in, sessions and playground tokens. Memberships and API keys stay.

    Returns False if the user is already deactivated.

    Raises:
        Conflict: the user is the caller or the last active operator, or no longer exists.
    """
    with _changing(user) as (row, operators):
        if not row.is_active:
            return False
        _require_another_operator(row, operators)
        _update(row, "user.deactivated", is_active=False, session_generation=row.session_generation + 1)
    return True


def do_reactivate_user(user: User) -> bool:
    """Let a deactivated user sign in again. Earlier sessions and known devices remain invalid.

    Returns False if the user was active.

    Raises:
        Conflict: the user is the caller, or no longer exists.
    """
    with _changing(user) as (row, _):
        if row.is_active:
            return False
        _update(row, "user.reactivated", is_active=True)
    return True


def do_grant_operator(user: User) -> bool:
    """Make a user an operator. Returns False if the user was one.

    Raises:
        Conflict: the user is the caller, or no longer exists.
    """
    with _changing(user) as (row, _):
        if row.is_staff:
            return False
        _update(row, "user.operator_granted", is_staff=True, is_superuser=True)
    return True


def do_revoke_operator(user: User) -> bool:
    """Revoke operator rights. The user and the user's memberships stay. Returns False if the user had no such rights.

    Raises:
        Conflict: the user is the caller or the last active operator, or no longer exists.
    """
    with _changing(user) as (row, operators):
        if not row.is_staff and not row.is_superuser:
            return False
        _require_another_operator(row, operators)
        generation = row.session_generation + 1
        _update(row, "user.operator_revoked", is_staff=False, is_superuser=False, session_generation=generation)
    return True


def do_rename_user(user: User, name: str) -> bool:
    """Change the name of a user, who does it themselves. Returns False if it is the same."""
    with transaction.atomic():
        row = User.objects.select_for_update(no_key=True).get(pk=user.pk)
        if row.name == name:
            return False
        _update(row, "user.renamed", name=name)
    return True


def do_remove_second_factor(user: User) -> bool:
    """Remove a user's lost second factor with its recovery codes, end the user's sessions, and email the user.

    Returns False if the user had none.

    Raises:
        Conflict: the user is the caller, or no longer exists.
    """
    with _changing(user) as (row, _):
        authenticators = Authenticator.objects.filter(user=row)
        if not (types := sorted(authenticators.values_list("type", flat=True))):
            return False
        audit.record_person("user.second_factor_removed", row, before={"types": types})
        authenticators.delete()
        row.session_generation += 1
        row.save(update_fields=["session_generation"])
        transaction.on_commit(partial(user_emails.queue_second_factor_removed_email, row.pk))
    return True


def do_reset_password(user: User) -> str:
    """Set a new random password of a user, end the user's sessions, email the user, and return the password.

    Raises:
        Conflict: the user is the caller, is deactivated, or no longer exists.
    """
    password = secrets.token_urlsafe(15)
    with _changing(user) as (row, _):
        if not row.is_active:
            raise Conflict(Text("This user is deactivated. Reactivate the user first."))
        audit.record_person("user.password_reset", row)
        row.set_password(password)
        row.session_generation += 1
        row.save(update_fields=["password", "session_generation"])
        transaction.on_commit(partial(user_emails.queue_operator_set_password_email, row.pk))
    return password


@contextmanager
def _changing(user: User) -> Iterator[tuple[User, set[int]]]:
    """Open a transaction and yield the locked row of the user and the IDs of the active operators."""
    if audit.current_actor().user_id == user.pk:
        raise Conflict(Text("You can’t change your own login here. Ask another operator."))
    with transaction.atomic():
        wanted = Q(pk=user.pk) | Q(is_staff=True, is_active=True)
        rows = {row.pk: row for row in User.objects.select_for_update(no_key=True).filter(wanted).order_by("pk")}
        if user.pk not in rows:
            raise Conflict(Text("This user no longer exists."))
        yield rows[user.pk], {row.pk for row in rows.values() if row.is_staff and row.is_active}


def _require_another_operator(row: User, operators: set[int]) -> None:
    """Require another active operator. NOTE: the operators' rows are locked until the transaction ends."""
    if operators == {row.pk}:
        raise Conflict(Text("The platform needs an active operator. Make another user an operator first."))


def _update(row: User, action: str, **changes: object) -> None:
    """Write the audit entry, then the change."""
    before = audit.serialize_for_audit(row)
    for name, value in changes.items():
        setattr(row, name, value)
    audit.record_person(action, row, before=before, after=audit.serialize_for_audit(row))
    row.save(update_fields=list(changes))
