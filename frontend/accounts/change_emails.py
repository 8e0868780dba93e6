"""Emails and audit entries about each change of a user's password, second factor or connected identity."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial

from django.conf import settings
from django.db import transaction
from django.http import HttpRequest
from django.utils.translation import gettext as _

from frontend.accounts.sessions import device_of
from frontend.core.languages import day_text
from frontend.core.languages import lazy_text as _lazy
from tenants import audit
from tenants.models import User
from tenants.outbox import user_emails

# By the name of the change, which is that of allauth's email, with "passkey" for "webauthn".
CHANGES = {
    "password_changed": (_lazy("Password changed"), _lazy("The password of your Millrace account was changed.")),
    "password_set": (_lazy("Password set"), _lazy("A password was set for your Millrace account.")),
    "password_reset": (_lazy("Password reset"), _lazy("The password of your Millrace account was reset.")),
    "totp_activated": (
        _lazy("Authenticator app added"),
        _lazy("An authenticator app was added to your Millrace account."),
    ),
    "totp_deactivated": (
        _lazy("Authenticator app removed"),
        _lazy("The authenticator app of your Millrace account was removed."),
    ),
    "passkey_added": (_lazy("Passkey added"), _lazy("A passkey was added to your Millrace account.")),
    "passkey_removed": (_lazy("Passkey removed"), _lazy("A passkey of your Millrace account was removed.")),
    "recovery_codes_generated": (
        _lazy("New recovery codes"),
        _lazy("New recovery codes of your Millrace account were created. The earlier ones no longer work."),
    ),
    "recovery_codes_viewed": (
        _lazy("Recovery codes viewed"),
        _lazy("The recovery codes of your Millrace account were viewed."),
    ),
    "account_connected": (
        _lazy("Sign-in provider connected"),
        _lazy("An identity of a sign-in provider was connected to your Millrace account and can sign in to it."),
    ),
    "account_disconnected": (
        _lazy("Sign-in provider disconnected"),
        _lazy("An identity of a sign-in provider was disconnected from your Millrace account."),
    ),
}


def report_change(request: HttpRequest, user: User, change: str, after: Mapping[str, str] | None = None) -> None:
    """Write the audit entry of a change, and email the user in the language of the request.

    The user who changes a password by an emailed link, or signs in through a provider, is the actor.
    """
    actor = audit.current_actor()
    with audit.actor_context(actor if actor.user_id else actor.as_user(user)):
        audit.record_person(f"user.{change}", user, after=after)
    subject, text = (str(part) for part in CHANGES[change])
    now = datetime.now(UTC)
    details = {
        "device": device_of(request.headers.get("user-agent", "")),
        "address": request.META.get("REMOTE_ADDR", ""),
        "day": day_text(now, "j F Y"),
        "time": f"{now:%H:%M}",
    }
    parts = (
        text,
        _("Device: %(device)s\nIP address: %(address)s\nTime: %(day)s, %(time)s UTC") % details,
        _("If this was not you, set a new password, sign out all other sessions and contact your operator."),
        f"{settings.MILLRACE.base_url}/account/",
    )
    button, reason = _("View account"), _("You receive this email because you have a Millrace account.")
    queue = partial(user_emails.queue_user_email, user.pk, subject, "\n\n".join(parts), button, reason)
    transaction.on_commit(queue)
