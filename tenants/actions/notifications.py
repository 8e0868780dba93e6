"""Actions on the notifications of one user. They change only what this user sees, so they write no audit entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from inference_worker.contract.texts import Text
from tenants.actions.common import ActionRefused, Conflict, locked_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Membership, NotificationChannel, Tenant, User
from tenants.notifications.kinds import NotificationKind, kinds_of
from tenants.notifications.notifying import rows_of


class ChosenChannels(NamedTuple):
    """The channels of a kind of notifications."""

    in_console: bool
    by_email: bool


def channels_of(tenant: Tenant | None, user: User, role: str | None) -> list[tuple[NotificationKind, ChosenChannels]]:
    """Return the channels of each kind that the user sees, with the defaults of the kinds. The scope must be open."""
    rows = rows_of(NotificationChannel, None if tenant is None else tenant.pk).filter(user=user)
    chosen = {row.kind: ChosenChannels(row.in_console, row.by_email) for row in rows}
    return [(kind, chosen.get(kind.name, ChosenChannels(True, kind.is_emailed))) for kind in kinds_of(role)]


def do_set_notification_channels(
    tenant: Tenant | None, user: User, wanted: Mapping[str, ChosenChannels]
) -> list[NotificationChannel]:
    """Set a user's channels for kinds of notifications. Without a tenant: for the kinds of operators.

    Raises:
        ActionRefused: the user's role does not see a kind.
        Conflict: the user is no longer a member, or no operator.
    """
    with _scope_of(tenant, user) as role:
        known = {kind.name for kind in kinds_of(role)}
        if unknown := sorted(set(wanted) - known):
            raise ActionRefused(Text("Unknown kind of notifications: %(kind)s.", kind=unknown[0]))
        rows = rows_of(NotificationChannel, None if tenant is None else tenant.pk)
        return [
            rows.update_or_create(tenant=tenant, user=user, kind=name, defaults=channels._asdict())[0]
            for name, channels in sorted(wanted.items())
        ]


@contextmanager
def _scope_of(tenant: Tenant | None, user: User) -> Iterator[str | None]:
    """Open a transaction that changes the user's channels, and yield the user's role; None for an operator.

    Raises:
        Conflict: the user is no longer a member, or no operator.
    """
    if tenant is None:
        with all_tenants_scope(BypassReason.OPERATOR):
            # NOTE: the lock serializes two changes of the same user.
            if not User.objects.select_for_update().filter(pk=user.pk, is_staff=True).exists():
                raise Conflict(Text("You are no longer an operator."))
            yield None
        return
    with locked_tenant(tenant) as locked:
        member = Membership.objects.for_tenant(locked).filter(user=user).first()
        if member is None:
            raise Conflict(Text("You are no longer a member of this organization."))
        yield member.role
