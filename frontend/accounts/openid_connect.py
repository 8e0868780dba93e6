"""Sign-in by OpenID Connect: checks of everything that the provider answers.

allauth runs the flow: it keeps the state of a sign-in in the session, sends PKCE and links accounts. This module reads
the provider's answers. A refused answer raises ProviderProblem, and the page of the sign-in shows its message. Only
the claims that the platform uses are passed on and stored.

The ID token comes from the token endpoint by TLS, so its signature is not checked (OpenID Connect Core 1.0, 3.1.3.7).
"""

from __future__ import annotations

import hashlib
import json
from time import monotonic
from typing import Any

import jwt
import requests
import structlog
import urllib3
from allauth.socialaccount import app_settings
from allauth.socialaccount.adapter import get_adapter
from allauth.socialaccount.helpers import render_authentication_error
from allauth.socialaccount.models import SocialApp, SocialToken
from allauth.socialaccount.providers.base import ProviderException
from allauth.socialaccount.providers.oauth2.client import OAuth2Client
from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView, OAuth2LoginView
from allauth.socialaccount.providers.openid_connect.provider import OpenIDConnectProvider
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.conf import settings
from django.db import IntegrityError
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.crypto import constant_time_compare
from django.utils.translation import gettext as _

from inference_worker.contract.secure_urls import is_secure_url
from tenants.stored_text import is_storable

log = structlog.get_logger(__name__)

DISCOVERY_SECONDS = 3600
CLOCK_SKEW_SECONDS = 60
MAX_ANSWER_BYTES = 256 * 1024
MAX_TOKEN = 20_000  # characters
MAX_URL = 2_000
MAX_EMAIL = 254
MAX_SUBJECT = app_settings.UID_MAX_LENGTH
LAST_TIME = 2**40  # seconds
REQUIRED_CLAIMS = ("iss", "sub", "aud", "exp")

_discovered: dict[str, tuple[float, dict[str, Any]]] = {}  # by issuer: when it expires, and the endpoints


class ProviderProblem(ProviderException):
    """An answer of the provider that is refused. The message is for the user."""


def login(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Redirect to the provider."""
    return _run(OAuth2LoginView, request, provider_id)


def callback(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Complete a sign-in with the provider's answers."""
    return _run(OAuth2CallbackView, request, provider_id)


def _run(view: type[Any], request: HttpRequest, provider_id: str) -> HttpResponse:
    adapter = OidcAdapter(request, provider_id)
    try:
        response: HttpResponse = view.adapter_view(adapter)(request)
    except SocialApp.DoesNotExist as exc:
        raise Http404 from exc
    except ProviderProblem as exc:
        return _refuse(request, adapter, exc)
    except IntegrityError:  # two callbacks linked the same account
        problem = ProviderProblem(_("This sign-in was completed at the same time in another window."))
        return _refuse(request, adapter, problem)
    return response


def _refuse(request: HttpRequest, adapter: OidcAdapter, problem: ProviderProblem) -> HttpResponse:
    response: HttpResponse = render_authentication_error(request, adapter.get_provider(), exception=problem)
    return response


def reason_of(exception: Exception | None, code: str) -> str:
    """Return why a sign-in failed, for its page.

    Args:
        exception: of the sign-in, if it got so far.
        code: parameter `error` of the provider's redirect, or empty.
    """
    if isinstance(exception, ProviderProblem):
        log.warning("oidc_answer_refused", reason=str(exception))
        return str(exception)
    if code:
        return _("Your identity provider reported an error.")
    return _("The sign-in took too long, or was started in another browser.")


class OidcClient(OAuth2Client):
    """The request for tokens."""

    def get_access_token(
        self, code: str, pkce_code_verifier: str | None = None, extra_data: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Exchange the code of the redirect for tokens."""
        sent = {"grant_type": "authorization_code", "code": code, "redirect_uri": self.callback_url}
        sent |= {"code_verifier": pkce_code_verifier or ""} | (extra_data or {})
        auth = None
        if self.basic_auth:
            auth = requests.auth.HTTPBasicAuth(self.consumer_key, self.consumer_secret)
        else:
            sent |= {"client_id": self.consumer_key, "client_secret": self.consumer_secret}
        data = {name: value for name, value in sent.items() if value}
        return _read_object("POST", self.access_token_url, data=data, auth=auth)


class OidcAdapter(OpenIDConnectOAuth2Adapter):
    """The flow of a sign-in, with the checks of the answers."""

    client_class = OidcClient
    _nonce = ""

    @property
    def openid_config(self) -> dict[str, Any]:
        return discover(self.get_provider().app.settings["server_url"])

    def get_callback_url(self, request: HttpRequest, app: SocialApp) -> str:
        """Return the redirect URL that is registered at the provider, whatever host the request has."""
        path = reverse("openid_connect_callback", kwargs={"provider_id": self.provider_id})
        return f"{settings.MILLRACE.base_url}{path}"

    def get_access_token_data(
        self, request: HttpRequest, app: SocialApp, client: OAuth2Client, pkce_code_verifier: str | None = None
    ) -> dict[str, Any]:
        self._nonce = _nonce_of(pkce_code_verifier or "")
        answer: dict[str, Any] = super().get_access_token_data(request, app, client, pkce_code_verifier)
        return answer

    def parse_token(self, data: dict[str, Any]) -> SocialToken:
        """Return the access token. Its expiry and the refresh token are not used."""
        token = _text(data, "access_token", MAX_TOKEN)
        if not (token.isascii() and token.isprintable()):
            raise _make_problem("access_token")
        return SocialToken(token=token)

    def complete_login(self, request: HttpRequest, app: SocialApp, token: SocialToken, **kwargs: Any) -> Any:
        """Return the identity, if both the ID token and userinfo name it."""
        id_token = self._read_id_token(app, _text(kwargs["response"], "id_token", MAX_TOKEN))
        sources = [id_token]
        if url := self.openid_config["userinfo_endpoint"]:
            userinfo = _read_object("GET", url, headers={"Authorization": f"Bearer {token.token}"})
            if _text(userinfo, "sub", MAX_SUBJECT) != id_token["sub"]:
                raise ProviderProblem(_("The ID token and userinfo of your identity provider name different users."))
            sources = [userinfo, id_token]
        identity = _identity(id_token["sub"], sources)
        if id_token.get("auth_time") is not None:
            identity["auth_time"] = id_token["auth_time"]
        return self.get_provider().sociallogin_from_response(request, identity)

    def _read_id_token(self, app: SocialApp, text: str) -> dict[str, Any]:
        """Return the claims of the ID token.

        Raises:
            ProviderProblem: it has expired, or is for another client, of another issuer or of another sign-in.
        """
        try:
            claims: dict[str, Any] = jwt.decode(
                text,
                options={
                    "verify_signature": False,  # true would turn off the other checks
                    "verify_exp": True,
                    "verify_iat": True,
                    "verify_nbf": True,
                    "verify_iss": True,
                    "verify_aud": True,
                    "require": list(REQUIRED_CLAIMS),
                },
                issuer=self.openid_config["issuer"],
                audience=app.client_id,
                leeway=CLOCK_SKEW_SECONDS,
            )
        except jwt.ExpiredSignatureError as exc:
            raise ProviderProblem(_("The ID token of your identity provider has expired.")) from exc
        except jwt.InvalidIssuerError as exc:
            raise ProviderProblem(_("The ID token of your identity provider is of another issuer.")) from exc
        except jwt.InvalidAudienceError as exc:
            raise ProviderProblem(_("The ID token of your identity provider is for another client.")) from exc
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as exc:
            raise _make_problem("id_token") from exc
        _text(claims, "sub", MAX_SUBJECT)
        party = claims.get("azp", claims["aud"] if isinstance(claims["aud"], str) else "")
        if party != app.client_id and ("azp" in claims or len(claims["aud"]) > 1):
            raise ProviderProblem(_("The ID token of your identity provider is for another client."))
        if not constant_time_compare(_text(claims, "nonce", MAX_TOKEN), self._nonce):
            raise ProviderProblem(_("The ID token of your identity provider is of another sign-in."))
        authenticated_at = claims.get("auth_time")
        if authenticated_at is not None and not (
            type(authenticated_at) in (int, float) and 0 <= authenticated_at <= LAST_TIME
        ):
            raise _make_problem("auth_time")
        return claims


class OidcProvider(OpenIDConnectProvider):
    """The configured provider."""

    oauth2_adapter_class = OidcAdapter

    def get_pkce_params(self) -> dict[str, Any]:
        """Return the parameters of PKCE and the nonce, which are derived from the same secret of the session."""
        found: dict[str, Any] = super().get_pkce_params()
        return found | {"nonce": _nonce_of(found["code_verifier"])}


def discover(issuer: str) -> dict[str, Any]:
    """Return the issuer and the endpoints of the provider. They are read again after DISCOVERY_SECONDS.

    Raises:
        ProviderProblem: the document cannot be read or is refused.
    """
    expires, found = _discovered.get(issuer, (0.0, {}))
    if monotonic() < expires:
        return found
    answer = _read_object("GET", f"{issuer}/.well-known/openid-configuration")
    # NOTE: some providers end their issuer with a slash, which the setting does not have.
    named = _text(answer, "issuer", MAX_URL)
    if named.rstrip("/") != issuer:
        raise ProviderProblem(_("Your identity provider names another issuer than MILLRACE_OIDC_ISSUER."))
    found = {"issuer": named, "userinfo_endpoint": ""}
    for name in ("authorization_endpoint", "token_endpoint", "userinfo_endpoint"):
        if name != "userinfo_endpoint" or answer.get(name) is not None:
            found[name] = _text(answer, name, MAX_URL)
            if not is_secure_url(found[name]):
                raise _make_problem(name)
    methods = answer.get("token_endpoint_auth_methods_supported")
    found["token_endpoint_auth_methods_supported"] = methods if isinstance(methods, list) else []
    _discovered.clear()  # a process uses one issuer
    _discovered[issuer] = monotonic() + DISCOVERY_SECONDS, found
    return found


def _identity(subject: str, sources: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the claims that are used. An address counts as verified only by the answer that contains it."""
    for source in sources:
        if source.get("email") not in (None, ""):
            verified = source.get("email_verified")
            email = _text(source, "email", MAX_EMAIL)
            return {"sub": subject, "email": email, "email_verified": verified is True or verified == "true"}
    return {"sub": subject}


def _nonce_of(code_verifier: str) -> str:
    return hashlib.sha256(f"nonce {code_verifier}".encode()).hexdigest()


def _read_object(method: str, url: str, **sent: Any) -> dict[str, Any]:
    """Return the JSON object that the provider answers. Redirects are not followed: requests contain secrets.

    Raises:
        ProviderProblem: there is none, or it is too long.
    """
    try:
        with (
            get_adapter().get_requests_session() as session,
            session.request(method, url, stream=True, allow_redirects=False, **sent) as response,
        ):
            status = response.status_code
            body: bytes = response.raw.read(MAX_ANSWER_BYTES + 1, decode_content=True)
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as exc:
        raise ProviderProblem(_("Your identity provider could not be reached.")) from exc
    if status not in (200, 201):
        raise ProviderProblem(_("Your identity provider answered with status %(status)s.") % {"status": status})
    if len(body) > MAX_ANSWER_BYTES:
        raise ProviderProblem(_("The answer of your identity provider is too long."))
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ProviderProblem(_("The answer of your identity provider is not a JSON object."))
    return answer


def _text(answer: dict[str, Any], name: str, longest: int) -> str:
    """Return a text of an answer.

    Raises:
        ProviderProblem: it is missing, no text, too long, or cannot be stored.
    """
    value = answer.get(name)
    if value in (None, ""):
        raise ProviderProblem(_("The answer of your identity provider has no %(name)s.") % {"name": name})
    if not isinstance(value, str) or len(value) > longest or not is_storable(value):
        raise _make_problem(name)
    return value


def _make_problem(name: str) -> ProviderProblem:
    return ProviderProblem(_("The answer of your identity provider has an invalid %(name)s.") % {"name": name})
