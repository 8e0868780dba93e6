"""Passkeys (WebAuthn): a second factor, and a sign-in without password where the passkey verifies its user.

They are rows of allauth's authenticators, next to TOTP and recovery codes. allauth stores the challenge in the session.
Here, a challenge is valid for one response, also for a wrong one. A response must have the origin of
MILLRACE_PUBLIC_URL, and the signature counter of a passkey must increase.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from allauth.account.internal.flows.login import record_authentication
from allauth.core import context
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.base.views import AuthenticateView
from allauth.mfa.models import Authenticator
from allauth.mfa.webauthn import views
from allauth.mfa.webauthn.forms import (
    AddWebAuthnForm,
    AuthenticateWebAuthnForm,
    EditWebAuthnForm,
    LoginWebAuthnForm,
    ReauthenticateWebAuthnForm,
)
from allauth.mfa.webauthn.internal import auth
from django import forms
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import Http404, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from fido2.webauthn import ResidentKeyRequirement, UserVerificationRequirement

from frontend.accounts.throttling import attempt
from tenants import audit
from tenants.models import User

MAX_PASSKEYS = 10
MAX_NAME = 60
MAX_RESPONSE = 20_000  # characters; a response with an attestation has about 2,000
COUNTER = "sign_count"  # the name of the signature counter in the data of an authenticator


def base_origin() -> str:
    """Return the origin of MILLRACE_PUBLIC_URL, as browsers name it."""
    parts = urlsplit(settings.MILLRACE.base_url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    port = "" if parts.port in (None, default) else f":{parts.port}"
    return f"{parts.scheme}://{parts.hostname or ''}{port}"


def relying_party_id() -> str:
    """Return the host name of MILLRACE_PUBLIC_URL, which passkeys are bound to; empty if browsers accept none for it.

    A passkey needs a host name, not an IP address, and HTTPS except on localhost.
    """
    parts = urlsplit(settings.MILLRACE.base_url)
    host = parts.hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host if parts.scheme == "https" or host == "localhost" else ""
    return ""


class MfaAdapter(DefaultMFAAdapter):
    """The identity of the platform in passkeys."""

    def get_public_key_credential_rp_entity(self) -> dict[str, str]:
        return {"id": relying_party_id() or "localhost", "name": "Millrace"}

    def generate_authenticator_name(self, user: Any, type: Authenticator.Type) -> str:
        number = Authenticator.objects.filter(user_id=user.pk, type=type).count()
        return _("Passkey %(number)s") % {"number": number + 1}


def passkeys_of(user: User) -> int:
    """Return the number of passkeys of the user."""
    return int(Authenticator.objects.filter(user=user, type=Authenticator.Type.WEBAUTHN).count())


@contextmanager
def _single_use() -> Iterator[None]:
    """Drop the challenge of the session after the block, also after an error."""
    try:
        yield
    finally:
        auth.clear_state()


def _make_rejection() -> ValidationError:
    return ValidationError(_("The passkey was not accepted. Try again."), code="passkey_rejected")


def _check_origin(response: Any) -> None:
    """Require the exact origin of MILLRACE_PUBLIC_URL. The library also accepts other ports and subdomains.

    Raises:
        ValidationError: the response is of another origin.
    """
    if response.response.client_data.origin != base_origin():
        raise _make_rejection()


class _PasskeyResponse:
    """A form with the response of a passkey. Each response counts as an attempt of the user."""

    user: Any
    cleaned_data: dict[str, Any]

    def clean_credential(self) -> Authenticator:
        """Return the passkey.

        Raises:
            ValidationError: the response is wrong, or the attempt must wait.
        """
        with _single_use():
            sent = _checked_size(self.cleaned_data["credential"])
            try:
                response = auth.parse_authentication_response(sent)
                user = self.user or auth.extract_user_from_response(sent)
            except (KeyError, AttributeError, TypeError, ValueError) as exc:
                raise _make_rejection() from exc
            with attempt(context.request, "passkey", user.email) as counted:
                _check_origin(response)
                # NOTE: the challenge of a second step, which needs no verified user, could be used here too.
                if self.user is None and not response.response.authenticator_data.is_user_verified():
                    raise _make_rejection()
                try:
                    found = super().clean_credential()  # type: ignore[misc]  # of the form this is mixed into
                except (ValidationError, KeyError, AttributeError, TypeError, ValueError) as exc:
                    raise _make_rejection() from exc
                _advance_counter(found, response.response.authenticator_data.counter)
                counted.succeed()
        return cast(Authenticator, found)


def _checked_size(sent: Any) -> dict[str, Any]:
    """Return the response.

    Raises:
        ValidationError: it is not an object, or too long.
    """
    if not isinstance(sent, dict) or len(json.dumps(sent)) > MAX_RESPONSE:
        raise _make_rejection()
    return sent


def _advance_counter(passkey: Authenticator, counter: int) -> None:
    """Store the signature counter of a response.

    Raises:
        ValidationError: it did not increase, so another device may have a copy of the passkey. Passkeys that are synced
            between devices always send 0.
    """
    with transaction.atomic():
        row = Authenticator.objects.select_for_update().get(pk=passkey.pk)
        stored = int(row.data.get(COUNTER, 0))
        is_copy = counter <= stored and (counter, stored) != (0, 0)
        if not is_copy:
            row.data[COUNTER] = counter
            row.save(update_fields=["data"])
            passkey.data = row.data
    if is_copy:
        audit.record_person("user.passkey_rejected", passkey.user, after={"name": passkey.data.get("name", "")})
        raise ValidationError(
            _("This passkey may have been copied, so it was not accepted. Remove it and use another way to sign in."),
            code="passkey_copied",
        )


class EnterPasskey(_PasskeyResponse, AuthenticateWebAuthnForm):
    """The second step of a sign-in."""


class EnterPasskeyAgain(_PasskeyResponse, ReauthenticateWebAuthnForm):
    """Re-authentication with a passkey."""


class SignInWithPasskey(_PasskeyResponse, LoginWebAuthnForm):
    """Sign-in with a passkey instead of a password. The passkey must verify its user, such as by a fingerprint."""


class AddPasskeyForm(AddWebAuthnForm):
    """A new passkey."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields.pop("passwordless", None)
        self.fields["name"] = forms.CharField(
            label=_("Name"), max_length=MAX_NAME, required=False, help_text=_("For example the device that stores it")
        )

    def clean(self) -> dict[str, Any]:
        with _single_use():
            sent = self.cleaned_data.get("credential")
            if sent:
                try:
                    response = auth.parse_registration_response(_checked_size(sent))
                    _check_origin(response)
                    self._check_new(response)
                    return cast("dict[str, Any]", super().clean())
                except (ValidationError, KeyError, AttributeError, TypeError, ValueError) as exc:
                    raise _make_rejection() from exc
        return cast("dict[str, Any]", self.cleaned_data)

    def _check_new(self, response: Any) -> None:
        """Require that the user does not have the passkey, as after a second click.

        Raises:
            ValidationError: the user has it.
        """
        added = response.response.attestation_object.auth_data.credential_data.credential_id
        if added in {credential.credential_id for credential in auth.get_credentials(self.user)}:
            raise _make_rejection()


class RenamePasskeyForm(EditWebAuthnForm):
    """The name of a passkey."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["name"] = forms.CharField(label=_("Name"), max_length=MAX_NAME)

    def save(self) -> Authenticator:
        before = self.instance.wrap().name
        saved: Authenticator = super().save()
        after = {"name": self.cleaned_data["name"]}
        audit.record_person("user.passkey_renamed", self.instance.user, before={"name": before}, after=after)
        return saved


class AddPasskey(views.AddWebAuthnView):
    """Registration of a passkey. It also completes this session with a second factor."""

    template_name = "mfa/webauthn/add_form.html"

    def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        if not relying_party_id():
            raise Http404
        if request.user.is_authenticated and passkeys_of(request.user) >= MAX_PASSKEYS:
            messages.error(request, _("You have the maximum of %(number)s passkeys.") % {"number": MAX_PASSKEYS})
            return redirect("mfa_list_webauthn")
        response: HttpResponse = super().dispatch(request, *args, **kwargs)
        return response

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        shown: dict[str, Any] = super(views.AddWebAuthnView, self).get_context_data(**kwargs)
        return shown | {"options": json.dumps(self._options())}

    def _options(self) -> dict[str, Any]:
        """Return the options for the browser. Any passkey is accepted; most of them also replace the password."""
        user = self.request.user
        created, state = auth.get_server().register_begin(
            user=auth.build_user_payload(user),
            credentials=auth.get_credentials(user),
            resident_key_requirement=ResidentKeyRequirement.PREFERRED,
            user_verification=UserVerificationRequirement.PREFERRED,
            extensions=auth.EXTENSIONS,
        )
        auth.set_state(state)
        return dict(created)

    def form_valid(self, form: forms.Form) -> HttpResponse:
        response: HttpResponse = super().form_valid(form)
        made = Authenticator.objects.filter(user=self.request.user, type=Authenticator.Type.WEBAUTHN).latest("pk")
        made.data[COUNTER] = made.wrap().authenticator_data.counter
        made.save(update_fields=["data"])
        record_authentication(self.request, made.user, "mfa", id=made.pk, type=made.type, reauthenticated=True)
        return response


class ReauthenticateWithPasskey(views.ReauthenticateWebAuthnView):
    """Re-authentication with a passkey. An error is shown on the same page."""

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        shown: dict[str, Any] = super().get_context_data(**kwargs)
        return shown | {"options": json.dumps(shown["js_data"]["request_options"])}

    def form_invalid(self, form: forms.Form) -> HttpResponse:
        for error in form.errors.get("credential", []):
            messages.error(self.request, str(error))
        return HttpResponseRedirect(self.request.get_full_path())


class ListPasskeys(views.ListWebAuthnView):
    """The passkeys of the user."""

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        shown: dict[str, Any] = super().get_context_data(**kwargs)
        return shown | {"is_available": bool(relying_party_id()), "host": urlsplit(settings.MILLRACE.base_url).hostname}


class Authenticate(AuthenticateView):
    """The second step of a sign-in, by a code or a passkey."""

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        shown: dict[str, Any] = super().get_context_data(**kwargs)
        return shown | {"passkey_options": json.dumps(shown["js_data"]["request_options"])}
