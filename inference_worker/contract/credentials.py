"""Delivery of upstream credentials to workers, sealed to a key pair of each worker process.

A process creates a key pair when it starts. The private key stays in its memory. It publishes the public key with the
deployments that it serves, authenticated by MILLRACE_WORKER_SECRET. The platform seals the secrets that these
deployments need to this key (HPKE, RFC 9180) and stores the box. So a copy of Valkey contains no usable secret, and a
client of Valkey without the worker secret cannot request one.
"""

from __future__ import annotations

import hmac

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

WORKER_KEYS_KEY = "millrace:worker_keys"  # a set of process IDs
WORKER_KEY_TTL_SECONDS = 15
BOX_TTL_SECONDS = 300  # renewed by the process
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


class WorkerKey(msgspec.Struct, frozen=True):
    """The public key of a worker process, and what the process needs."""

    process_id: str
    public_key: bytes
    credentials: tuple[int, ...]  # ids of the platform's credentials, which its deployments name
    deployments: tuple[str, ...]  # for which tenants may have their own credentials
    mac: bytes = b""


class SealedCredentials(msgspec.Struct, frozen=True):
    """The credentials of a process, which only this process can open."""

    version: str  # changes with the contents
    box: bytes


class SealedContents(msgspec.Struct, frozen=True):
    """The contents of a box."""

    secrets: dict[int, str]
    max_concurrency: dict[int, int] = {}  # concurrent requests by id of the credentials that have a limit


def worker_key_name(process_id: str) -> str:
    return f"millrace:worker_key:{process_id}"


def sealed_credentials_name(process_id: str) -> str:
    return f"millrace:sealed_credentials:{process_id}"


_encode = msgspec.msgpack.Encoder().encode
_decode_key = msgspec.msgpack.Decoder(WorkerKey).decode
_decode_sealed = msgspec.msgpack.Decoder(SealedCredentials).decode
_decode_contents = msgspec.msgpack.Decoder(SealedContents).decode


def encode_worker_key(key: WorkerKey, worker_secret: str) -> bytes:
    """Encode the key with its authentication code."""
    return _encode(msgspec.structs.replace(key, mac=_mac(key, worker_secret)))


def decode_worker_key(payload: bytes, process_id: str, worker_secret: str) -> WorkerKey:
    """Decode the key of a process.

    Raises:
        ValueError: the payload is invalid, of another process, or not authenticated.
    """
    key = _decode_key(payload)
    if key.process_id != process_id or not hmac.compare_digest(key.mac, _mac(key, worker_secret)):
        raise ValueError("the key of the worker is not authenticated; compare MILLRACE_WORKER_SECRET")
    return key


def seal(contents: SealedContents, version: str, key: WorkerKey) -> bytes:
    """Seal the credentials to a process, and encode the box."""
    public_key = X25519PublicKey.from_public_bytes(key.public_key)
    box = _SUITE.encrypt(_encode(contents), public_key, _info(key.process_id, version))
    return _encode(SealedCredentials(version, box))


def sealed_version(payload: bytes) -> str:
    """Return the version of an encoded box.

    Raises:
        msgspec.MsgspecError: the payload is invalid.
    """
    return _decode_sealed(payload).version


def unseal(payload: bytes, process_id: str, private_key: X25519PrivateKey) -> SealedContents:
    """Open the box of a process.

    Raises:
        ValueError: the box is invalid, or sealed to another process.
    """
    sealed = _decode_sealed(payload)
    try:
        return _decode_contents(_SUITE.decrypt(sealed.box, private_key, _info(process_id, sealed.version)))
    except InvalidTag as exc:
        raise ValueError("the box is sealed to another process") from exc


def _mac(key: WorkerKey, worker_secret: str) -> bytes:
    unsigned = _encode(msgspec.structs.replace(key, mac=b""))
    return hmac.digest(worker_secret.encode(), b"millrace worker key\0" + unsigned, "sha256")


def _info(process_id: str, version: str) -> bytes:
    """Return what binds a box to its process and version."""
    return f"millrace credentials\0{process_id}\0{version}".encode()
