"""The token of an invitation and the mail that carries it.

The token is made of the row and of the platform's secret key, so that it is stored nowhere: neither the table alone
nor a job's message lets anybody in.
"""

from __future__ import annotations

import structlog
from django.conf import settings
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.module_loading import import_string
from kombu.exceptions import OperationalError

from millrace.conf.environment import platform_settings
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Invitation
from tenants.outbox.email_rendering import letter

log = structlog.get_logger(__name__)


def token(invitation: Invitation) -> str:
    """Return what the mail's link ends in."""
    return f"{invitation.pk}-{_proof(invitation)}"


def link(invitation: Invitation) -> str:
    return f"{platform_settings().base_url}/invitations/{token(invitation)}"


def find(text: str) -> Invitation | None:
    """Return the invitation a token belongs to, whether it is still open or not."""
    number, _, proof = text.partition("-")
    if not number.isdecimal() or len(number) > 18:
        return None
    with all_tenants_scope(BypassReason.INVITATION):
        rows = Invitation.objects.all_tenants().select_related("tenant", "invited_by")
        invitation = rows.filter(pk=int(number)).first()
    if invitation is None or not constant_time_compare(proof, _proof(invitation)):
        return None
    return invitation


def send(tenant_id: int, invitation_id: int) -> None:
    """Have a web job mail it: a mail server is slow, and may be away for a while."""
    app = import_string(settings.CELERY_APP)
    try:
        app.send_task("tenants.mail_invitation", [tenant_id, invitation_id], retry=False)
    except OperationalError as exc:
        log.warning("invitation_queueing_failed", invitation=invitation_id, error=str(exc))


def mail(tenant_id: int, invitation_id: int) -> None:
    """Mail it now, if it is still open."""
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
    why = "If you did not expect this invitation, ignore this email."
    subject = f"Invitation to {invitation.tenant.name} on Millrace"
    letter(subject, text, [invitation.email], button="Accept invitation", why=why).send()


def _proof(invitation: Invitation) -> str:
    value = f"{invitation.pk}:{invitation.tenant_id}:{invitation.email}:{invitation.nonce}"
    return salted_hmac("tenants.invitations", value, algorithm="sha256").hexdigest()
