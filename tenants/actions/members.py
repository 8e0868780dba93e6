"""Verbs on members and invitations."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from functools import partial

from django.db import transaction

from tenants import audit, invitations
from tenants.actions.common import ActionRefused, Conflict, changing, insert
from tenants.keys.key_snapshots import note
from tenants.models import ChangeEventRow, Invitation, Membership, Tenant, User

INVITATION_DAYS = 7


def do_add_member(tenant: Tenant, user: User, role: str) -> Membership:
    """Make the user a member, or change the role of one.

    Raises:
        ActionRefused: there is no such role.
        Conflict: it would leave the tenant without an owner.
    """
    _check_role(role)
    with changing(tenant) as locked:
        membership = Membership.objects.for_tenant(locked).filter(user=user).first()
        if membership is not None:
            return do_change_role(membership, role)
        membership = Membership.objects.create(tenant=locked, user=user, role=role)
        audit.record("member.created", membership, tenant_id=locked.pk, after=audit.described(membership))
        note(locked, ChangeEventRow.ChangeType.MEMBER)
    return membership


def do_change_role(membership: Membership, role: str) -> Membership:
    """Give a member another role.

    Raises:
        ActionRefused: there is no such role.
        Conflict: they are the last owner, or no longer a member.
    """
    _check_role(role)
    with changing(membership.tenant_id) as tenant:
        row = _member(tenant, membership)
        if row.role == role:
            return row
        before = audit.described(row)
        _keep_an_owner(tenant, row)
        row.role = role
        row.save(update_fields=["role"])
        audit.record("member.updated", row, tenant_id=tenant.pk, before=before, after=audit.described(row))
        note(tenant, ChangeEventRow.ChangeType.MEMBER)
    return row


def do_remove_member(membership: Membership) -> None:
    """Let a member go. Their keys stay: keys belong to projects.

    Raises:
        Conflict: they are the last owner, or no longer a member.
    """
    with changing(membership.tenant_id) as tenant:
        row = _member(tenant, membership)
        _keep_an_owner(tenant, row)
        audit.record("member.deleted", row, tenant_id=tenant.pk, before=audit.described(row))
        row.delete()
        note(tenant, ChangeEventRow.ChangeType.MEMBER)


def do_invite(tenant: Tenant, email: str, role: str, *, by: User | None = None) -> Invitation:
    """Ask somebody in, by mail. An open invitation of theirs is replaced by this one.

    Raises:
        ActionRefused: no such role, no address, or they are a member.
    """
    _check_role(role)
    email = email.strip().lower()
    now = datetime.now(UTC)
    with changing(tenant) as locked:
        if Membership.objects.for_tenant(locked).filter(user__email=email).exists():
            raise Conflict(f"{email} is already a member.")
        for old in Invitation.objects.for_tenant(locked).filter(
            email__iexact=email, accepted_at__isnull=True, revoked_at__isnull=True
        ):
            _revoke(locked, old, now)
        invitation = Invitation(
            tenant=locked,
            email=email,
            role=role,
            nonce=secrets.token_hex(16),
            invited_by=by,
            expires_at=now + timedelta(days=INVITATION_DAYS),
        )
        insert(invitation, f"{email} is already invited.")
        audit.record("invitation.created", invitation, tenant_id=locked.pk, after=audit.described(invitation))
        transaction.on_commit(partial(invitations.send, locked.pk, invitation.pk))
    return invitation


def do_revoke_invitation(invitation: Invitation) -> bool:
    """Take an invitation back. False if it was accepted or taken back before."""
    with changing(invitation.tenant_id) as tenant:
        row = Invitation.objects.for_tenant(tenant).filter(pk=invitation.pk).first()
        return row is not None and _revoke(tenant, row, datetime.now(UTC))


def do_accept_invitation(invitation: Invitation, user: User) -> Membership:
    """Make the invited person a member, once.

    Raises:
        Conflict: it was accepted or taken back, or its time is over.
        ActionRefused: it was sent to somebody else.
    """
    if user.email.lower() != invitation.email.lower():
        raise ActionRefused(f"This invitation is for {invitation.email}.")
    now = datetime.now(UTC)
    with changing(invitation.tenant_id) as tenant:
        rows = Invitation.objects.for_tenant(tenant)
        still_open = rows.filter(
            pk=invitation.pk, accepted_at__isnull=True, revoked_at__isnull=True, expires_at__gt=now
        )
        if not still_open.update(accepted_at=now, accepted_by=user):
            raise Conflict("This invitation was used, revoked or has expired. Request a new one.")
        row = rows.get(pk=invitation.pk)
        audit.record(
            "invitation.accepted",
            row,
            tenant_id=tenant.pk,
            before=audit.described(row) | {"accepted_at": None},
            after=audit.described(row),
        )
        if found := Membership.objects.for_tenant(tenant).filter(user=user).first():
            return found  # made a member another way meanwhile, by somebody who chose that role
        return do_add_member(tenant, user, row.role)


def _revoke(tenant: Tenant, invitation: Invitation, now: datetime) -> bool:
    before = audit.described(invitation)
    rows = Invitation.objects.for_tenant(tenant).filter(pk=invitation.pk)
    if not rows.filter(accepted_at__isnull=True, revoked_at__isnull=True).update(revoked_at=now):
        return False
    invitation.revoked_at = now
    after = audit.described(invitation)
    audit.record("invitation.revoked", invitation, tenant_id=tenant.pk, before=before, after=after)
    return True


def _member(tenant: Tenant, membership: Membership) -> Membership:
    row = Membership.objects.for_tenant(tenant).select_related("user", "tenant").filter(pk=membership.pk).first()
    if row is None:
        raise Conflict("This user is no longer a member.")
    return row


def _keep_an_owner(tenant: Tenant, leaving: Membership) -> None:
    """Refuse to lose the last owner. NOTE: the tenant's row is locked, so of two owners at once one stays."""
    owners = Membership.objects.for_tenant(tenant).filter(role=Membership.Role.OWNER)
    if leaving.role == Membership.Role.OWNER and not owners.exclude(pk=leaving.pk).exists():
        raise Conflict("At least one owner is required. Make another member an owner first.")


def _check_role(role: str) -> None:
    if role not in Membership.Role.values:
        raise ActionRefused(f"Unknown role {role!r}; known are {', '.join(Membership.Role.values)}.")
