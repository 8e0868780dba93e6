"""A passkey in software: creates and signs the responses of a browser with it."""

from __future__ import annotations

import hashlib
import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from fido2 import cbor
from fido2.cose import ES256

PRESENT, VERIFIED, ATTESTED = 0x01, 0x04, 0x40


def encode(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


def decode(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


@dataclass
class SoftPasskey:
    """One passkey. `counter`: None for a passkey without a counter, as of synced ones."""

    origin: str = "http://localhost:8000"
    host: str = "localhost"
    counter: int | None = 0
    is_verified: bool = True
    credential_id: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    user_handle: str = ""

    def create(self, options: dict[str, Any]) -> str:
        """Return the response to the options of a registration."""
        wanted = options["publicKey"]
        self.user_handle = wanted["user"]["id"]
        public = cbor.encode(ES256.from_cryptography_key(self.key.public_key()))
        attested = b"\0" * 16 + len(self.credential_id).to_bytes(2, "big") + self.credential_id + public
        data = self._authenticator_data(ATTESTED) + attested
        statement = cbor.encode({"fmt": "none", "attStmt": {}, "authData": data})
        client = self._client_data("webauthn.create", wanted["challenge"])
        return self._response(clientDataJSON=encode(client), attestationObject=encode(statement))

    def sign(self, options: dict[str, Any]) -> str:
        """Return the response to the options of a sign-in."""
        if self.counter is not None:
            self.counter += 1
        client = self._client_data("webauthn.get", options["publicKey"]["challenge"])
        data = self._authenticator_data(0)
        signature = self.key.sign(data + hashlib.sha256(client).digest(), ec.ECDSA(hashes.SHA256()))
        return self._response(
            clientDataJSON=encode(client),
            authenticatorData=encode(data),
            signature=encode(signature),
            userHandle=self.user_handle,
        )

    def _authenticator_data(self, flags: int) -> bytes:
        flags |= PRESENT | (VERIFIED if self.is_verified else 0)
        return hashlib.sha256(self.host.encode()).digest() + bytes([flags]) + (self.counter or 0).to_bytes(4, "big")

    def _client_data(self, kind: str, challenge: str) -> bytes:
        return json.dumps({"type": kind, "challenge": challenge, "origin": self.origin}).encode()

    def _response(self, **fields: str) -> str:
        name = encode(self.credential_id)
        sent = {"id": name, "rawId": name, "type": "public-key", "response": fields, "clientExtensionResults": {}}
        return json.dumps(sent)
