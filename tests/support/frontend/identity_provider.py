"""An OpenID Connect provider whose answers a test can change, and a sign-in with it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import jwt
from django.test import Client

CLIENT_ID = "millrace"
LOGIN = "/account/oidc/sso/login/"
KEY = "a key whose signatures are not checked"


class Remove:
    """A mark in changes of an answer: the field is removed."""


class IdentityProvider:
    """A provider with one user. `changes` replaces fields of its answers, and `bodies` complete answers."""

    def __init__(self, issuer: str) -> None:
        self.issuer = issuer
        self.claims: dict[str, Any] = {"sub": "u-1", "email": "dev@example.com", "email_verified": True}
        self.changes: dict[str, dict[str, Any]] = {}  # by answer: discovery, token, id_token, userinfo
        self.bodies: dict[str, tuple[int, bytes]] = {}
        self.nonce: str | None = None
        self.requests: list[str] = []

    def answer(self, name: str, code: str = "") -> dict[str, Any]:
        """Return one of the answers, with its changes. Without a `nonce`, the code of the request is the nonce."""
        now = int(time.time())
        match name:
            case "discovery":
                answer = {"issuer": self.issuer} | {
                    f"{field}": f"{self.issuer}/{field}"
                    for field in ("authorization_endpoint", "token_endpoint", "userinfo_endpoint", "jwks_uri")
                }
            case "token":
                answer = {
                    "access_token": "at",
                    "token_type": "Bearer",
                    "expires_in": 300,
                    "id_token": self._id_token(code),
                }
            case "id_token":
                answer = {
                    "iss": self.issuer,
                    "aud": CLIENT_ID,
                    "iat": now,
                    "exp": now + 300,
                    "nonce": self.nonce or code,
                }
                answer |= self.claims
            case _:
                answer = dict(self.claims)
        answer |= self.changes.get(name, {})
        return {field: value for field, value in answer.items() if value is not Remove}

    def _id_token(self, code: str) -> str:
        payload = json.dumps(self.answer("id_token", code)).encode()
        return jwt.api_jws.encode(payload, KEY, algorithm="HS256")


class _Handler(BaseHTTPRequestHandler):
    NAMES: ClassVar = {
        "/.well-known/openid-configuration": "discovery",
        "/token_endpoint": "token",
        "/userinfo_endpoint": "userinfo",
    }
    provider: IdentityProvider

    def do_GET(self) -> None:
        sent = parse_qs(self.rfile.read(int(self.headers.get("content-length", 0))).decode())
        name = self.NAMES[self.path]
        self.provider.requests.append(name)
        if name in self.provider.bodies:
            status, body = self.provider.bodies[name]
        else:
            status, body = 200, json.dumps(self.provider.answer(name, sent.get("code", [""])[0])).encode()
        if status == 0:
            self.close_connection = True  # without an answer
            return
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if status in (301, 302):
            self.send_header("location", body.decode())
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running() -> Iterator[IdentityProvider]:
    """Run a provider on a free port of 127.0.0.1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        provider = IdentityProvider(f"http://127.0.0.1:{server.server_port}")
        server.RequestHandlerClass = type("Handler", (_Handler,), {"provider": provider})
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield provider
        finally:
            server.shutdown()


def start(client: Client, provider: IdentityProvider, **sent: str) -> Any:
    """Start a sign-in. The provider then has the nonce of the request."""
    response = client.post(LOGIN, sent)
    provider.nonce = parameter(response, "nonce")
    return response


def parameter(response: Any, name: str) -> str | None:
    """Return a parameter of the redirect to the provider."""
    return parse_qs(urlsplit(response.headers.get("Location", "")).query).get(name, [None])[0]


def finish(client: Client, state: str | None, code: str = "c") -> Any:
    """Return to the platform, as a browser does after the user has signed in at the provider."""
    return client.get(f"{LOGIN}callback/", {"state": state or "", "code": code})


def sign_in(client: Client, provider: IdentityProvider, **sent: str) -> Any:
    """Sign in, and return the last response of the platform."""
    response = start(client, provider, **sent)
    if response.status_code != 302:
        return response
    return finish(client, parameter(response, "state"))
