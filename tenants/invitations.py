"""Invitation tokens and emails.

A token is derived from the row and the platform's secret key and is not stored. Neither the row nor a job's message is
enough to accept an invitation.
"""

from __future__ import annotations

import structlog
from django.conf import settings
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.module_loading import import_string
from kombu.exceptions import OperationalError

from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Invitation
from tenants.outbox.email_rendering import render_email

log = structlog.get_logger(__name__)


def token(invitation: Invitation) -> str:
    """Return the token at the end of the invitation's link."""
    return f"{invitation.pk}-{_proof(invitation)}"


def link(invitation: Invitation) -> str:
    return f"{settings.MILLRACE.base_url}/invitations/{token(invitation)}"


def find(text: str) -> Invitation | None:
    """Return the invitation of a token, in any state. None if the token is not valid."""
    number, _, proof = text.partition("-")
    if not number.isdecimal() or len(number) > 18:
        return None
    with all_tenants_scope(BypassReason.INVITATION):
        rows = Invitation.objects.all_tenants().select_related("tenant", "invited_by")
        invitation = rows.filter(pk=int(number)).first()
    if invitation is None or not constant_time_compare(proof, _proof(invitation)):
        return None
    return invitation


def queue_email(tenant_id: int, invitation_id: int) -> None:
    """Queue the email for a web job, because a mail server can be slow or down."""
    app = import_string(settings.CELERY_APP)
    try:
        app.send_task("tenants.send_invitation_email", [tenant_id, invitation_id], retry=False)
    except OperationalError as exc:
        log.warning("invitation_queueing_failed", invitation=invitation_id, error=str(exc))


def send_email(tenant_id: int, invitation_id: int) -> None:
    """Send the email if the invitation is still open."""
    with tenant_scope(tenant_id):
        rows = Invitation.objects.for_tenant(tenant_id).select_related("tenant", "invited_by")
        invitation = rows.filter(pk=invitation_id).first()
    if invitation is None or not invitation.is_open:
        return
    inviter = invitation.invited_by.email if invitation.invited_by else "An operator"
    text = (
        f"{inviter} invited you to {invitation.tenant.name} as {invitation.get_role_display()}.\n\n"
        f"Accept the invitation by {invitation.expires_at:%-d %B %Y, %H:%M} UTC:\n\n{link(invitation)}\n\n"
        "The link works once and only for this email address."
    )
    reason = "If you did not expect this invitation, ignore this email."
    subject = f"Invitation to {invitation.tenant.name} on Millrace"
    render_email(subject, text, [invitation.email], button="Accept invitation", reason=reason).send()


def _proof(invitation: Invitation) -> str:
    value = f"{invitation.pk}:{invitation.tenant_id}:{invitation.email}:{invitation.nonce}"
    return salted_hmac("tenants.invitations", value, algorithm="sha256").hexdigest()
