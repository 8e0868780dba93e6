"""Actions on members and invitations."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta

from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions.common import ActionRefused, Conflict, insert, locked_tenant
from tenants.keys.key_snapshots import record_change
from tenants.models import ChangeEventRow, Invitation, Membership, Tenant, User
from tenants.outbox.email_outbox import delete_unsent_invitation, enqueue_invitation

INVITATION_DAYS = 7


def do_add_member(tenant: Tenant, user: User, role: str) -> Membership:
    """Add a user to the tenant, or change the role of a member.

    Raises:
        ActionRefused: the role is unknown.
        Conflict: the tenant would have no owner.
    """
    _check_role(role)
    with locked_tenant(tenant) as locked:
        membership = Membership.objects.for_tenant(locked).filter(user=user).first()
        if membership is not None:
            return do_change_role(membership, role)
        membership = Membership.objects.create(tenant=locked, user=user, role=role)
        audit.record("member.created", membership, tenant_id=locked.pk, after=audit.serialize_for_audit(membership))
        record_change(locked, ChangeEventRow.ChangeType.MEMBER)
    return membership


def do_change_role(membership: Membership, role: str) -> Membership:
    """Change the role of a member.

    Raises:
        ActionRefused: the role is unknown.
        Conflict: the user is the last owner, or no longer a member.
    """
    _check_role(role)
    with locked_tenant(membership.tenant_id) as tenant:
        row = _member(tenant, membership)
        if row.role == role:
            return row
        before = audit.serialize_for_audit(row)
        _require_another_owner(tenant, row)
        row.role = role
        row.save(update_fields=["role"])
        audit.record("member.updated", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
        record_change(tenant, ChangeEventRow.ChangeType.MEMBER)
    return row


def do_remove_member(membership: Membership) -> None:
    """Remove a member. Keys that the member created remain, because they belong to projects.

    Raises:
        Conflict: the user is the last owner, or no longer a member.
    """
    with locked_tenant(membership.tenant_id) as tenant:
        row = _member(tenant, membership)
        _require_another_owner(tenant, row)
        audit.record("member.deleted", row, tenant_id=tenant.pk, before=audit.serialize_for_audit(row))
        row.delete()
        record_change(tenant, ChangeEventRow.ChangeType.MEMBER)


def do_invite(tenant: Tenant, email: str, role: str, *, by: User | None = None) -> Invitation:
    """Invite a user by email. It replaces an open invitation to the same email address.

    Raises:
        ActionRefused: the role or the email address is not valid.
        Conflict: the user is already a member.
    """
    _check_role(role)
    email = email.strip().lower()
    now = datetime.now(UTC)
    with locked_tenant(tenant) as locked:
        if Membership.objects.for_tenant(locked).filter(user__email=email).exists():
            raise Conflict(Text("%(email)s is already a member.", email=email))
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
        insert(invitation, Text("%(email)s is already invited.", email=email))
        audit.record("invitation.created", invitation, tenant_id=locked.pk, after=audit.serialize_for_audit(invitation))
        enqueue_invitation(invitation)
    return invitation


def do_revoke_invitation(invitation: Invitation) -> bool:
    """Revoke an invitation. Returns False if it is already accepted or revoked."""
    with locked_tenant(invitation.tenant_id) as tenant:
        row = Invitation.objects.for_tenant(tenant).filter(pk=invitation.pk).first()
        return row is not None and _revoke(tenant, row, datetime.now(UTC))


def do_accept_invitation(invitation: Invitation, user: User) -> Membership:
    """Accept an invitation and add the user to the tenant.

    Raises:
        Conflict: the invitation is accepted, revoked or expired.
        ActionRefused: the invitation is for another email address.
    """
    if user.email.lower() != invitation.email.lower():
        raise ActionRefused(Text("This invitation is for %(email)s.", email=invitation.email))
    now = datetime.now(UTC)
    with locked_tenant(invitation.tenant_id) as tenant:
        rows = Invitation.objects.for_tenant(tenant)
        still_open = rows.filter(
            pk=invitation.pk, accepted_at__isnull=True, revoked_at__isnull=True, expires_at__gt=now
        )
        if not still_open.update(accepted_at=now, accepted_by=user):
            raise Conflict(Text("This invitation was used, revoked or has expired. Request a new one."))
        row = rows.get(pk=invitation.pk)
        delete_unsent_invitation(row)  # the operator can also pass on the link
        audit.record(
            "invitation.accepted",
            row,
            tenant_id=tenant.pk,
            before=audit.serialize_for_audit(row) | {"accepted_at": None},
            after=audit.serialize_for_audit(row),
        )
        if membership := Membership.objects.for_tenant(tenant).filter(user=user).first():
            return membership  # added by another action, with a role that was chosen there
        return do_add_member(tenant, user, row.role)


def _revoke(tenant: Tenant, invitation: Invitation, now: datetime) -> bool:
    before = audit.serialize_for_audit(invitation)
    rows = Invitation.objects.for_tenant(tenant).filter(pk=invitation.pk)
    if not rows.filter(accepted_at__isnull=True, revoked_at__isnull=True).update(revoked_at=now):
        return False
    delete_unsent_invitation(invitation)
    invitation.revoked_at = now
    after = audit.serialize_for_audit(invitation)
    audit.record("invitation.revoked", invitation, tenant_id=tenant.pk, before=before, after=after)
    return True


def _member(tenant: Tenant, membership: Membership) -> Membership:
    row = Membership.objects.for_tenant(tenant).select_related("user", "tenant").filter(pk=membership.pk).first()
    if row is None:
        raise Conflict(Text("This user is no longer a member."))
    return row


def _require_another_owner(tenant: Tenant, leaving: Membership) -> None:
    """Require another owner if an owner leaves. NOTE: the tenant's row is locked against concurrent changes."""
    owners = Membership.objects.for_tenant(tenant).filter(role=Membership.Role.OWNER)
    if leaving.role == Membership.Role.OWNER and not owners.exclude(pk=leaving.pk).exists():
        raise Conflict(Text("At least one owner is required. Make another member an owner first."))


def _check_role(role: str) -> None:
    if role not in Membership.Role.values:
        raise ActionRefused(
            Text(
                "Unknown role %(role)s; known are %(values)s.",
                role=repr(role),
                values=", ".join(Membership.Role.values),
            )
        )


def do_set_alert_emails(tenant: Tenant, user: User, *, wanted: bool) -> bool:
    """Choose whether a member receives the alerts of a tenant by email. Returns False if nothing changed.

    Raises:
        Conflict: the user is no longer a member.
    """
    with locked_tenant(tenant) as locked:
        row = Membership.objects.for_tenant(locked).filter(user=user).first()
        if row is None:
            raise Conflict(Text("You are no longer a member of this organization."))
        if row.alert_emails == wanted:
            return False
        before = audit.serialize_for_audit(row)
        row.alert_emails = wanted
        audit.record(
            "member.alert_emails_changed",
            row,
            tenant_id=locked.pk,
            before=before,
            after=audit.serialize_for_audit(row),
        )
        row.save(update_fields=["alert_emails"])
    return True
