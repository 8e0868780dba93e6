"""Model bundles: the files of a model that gateways need, which its workers publish in Valkey.

A bundle has the configuration, the tokenizer and the chat template of a model directory, and no weights. Its name is
its SHA-256. Workers store it in chunks in the hash `millrace:model_bundle:<SHA-256>`. They then store a manifest for
each deployment in `millrace:model_manifest:<deployment key>`. Both expire unless a worker renews them.

Manifests are signed with MILLRACE_WORKER_SECRET. Without the signature, a client of Valkey could replace the chat
template of a deployment, and so change the prompts of all tenants.
"""

from __future__ import annotations

import hashlib
import hmac
import re

import msgspec

BUNDLE_FORMAT = 1  # a change of the contents or of the manifest needs a new number
MAX_BUNDLE_BYTES = 64 << 20
CHUNK_BYTES = 256 << 10  # read within the timeout of a gateway's client, also through a slow network
MAX_MANIFEST_BYTES = 4096
BUNDLE_TTL_SECONDS = 3600
_SALT_BYTES = 16


class BundleRefused(ValueError):
    """An error for a bundle that is too large, changed, not signed or of an unknown format."""


class BundleManifest(msgspec.Struct, frozen=True):
    """The bundle of one deployment."""

    deployment: str  # the deployment key, so that the bundle of another deployment is refused
    digest: str  # SHA-256 of the bundle, hexadecimal
    num_bytes: int
    created: int  # Unix seconds of the model's configuration

    @property
    def chunk_sizes(self) -> list[int]:
        return [min(CHUNK_BYTES, self.num_bytes - start) for start in range(0, self.num_bytes, CHUNK_BYTES)]


class SignedManifest(msgspec.Struct, frozen=True):
    """An encoded manifest with its authentication code. This struct is the same in every format."""

    format: int
    manifest: bytes
    mac: bytes


def bundle_key(digest: str) -> str:
    """Return the key of a hash: number of a chunk -> chunk."""
    return f"millrace:model_bundle:{digest}"


def manifest_key(deployment_key: str) -> str:
    return f"millrace:model_manifest:{deployment_key}"


_encode = msgspec.msgpack.Encoder().encode
_decode_signed = msgspec.msgpack.Decoder(SignedManifest).decode
_decode_manifest = msgspec.msgpack.Decoder(BundleManifest).decode


def hash_bundle(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def sign_manifest(manifest: BundleManifest, worker_secret: str, bundle_format: int = BUNDLE_FORMAT) -> bytes:
    """Encode the manifest with its authentication code."""
    encoded = _encode(manifest)
    return _encode(SignedManifest(bundle_format, encoded, _mac(bundle_format, encoded, worker_secret)))


def read_manifest(payload: bytes, deployment_key: str, worker_secret: str) -> BundleManifest:
    """Decode and check the manifest of a deployment.

    Raises:
        BundleRefused: the manifest is not signed with the secret, of an unknown format, or invalid.
    """
    try:
        signed = _decode_signed(payload)
        if not hmac.compare_digest(signed.mac, _mac(signed.format, signed.manifest, worker_secret)):
            raise BundleRefused(
                "its bundle is not signed with this gateway's MILLRACE_WORKER_SECRET; set the same secret everywhere"
            )
        if signed.format != BUNDLE_FORMAT:
            raise BundleRefused(
                f"its bundle has the unknown format {signed.format}; run one release of Millrace on all machines"
            )
        manifest = _decode_manifest(signed.manifest)
    except msgspec.MsgspecError as exc:
        raise BundleRefused(f"the manifest of its bundle is of an unknown format: {exc}") from None
    if manifest.deployment != deployment_key or not re.fullmatch(r"[0-9a-f]{64}", manifest.digest):
        raise BundleRefused("the manifest of its bundle is that of another deployment")
    if not 0 < manifest.num_bytes <= MAX_BUNDLE_BYTES:
        raise BundleRefused(f"its bundle has {manifest.num_bytes} bytes; the limit is {MAX_BUNDLE_BYTES}")
    return manifest


def derive_salt(cache_salt: bytes, variant: bytes) -> bytes:
    """Return the salt of a replica's prefix cache.

    Args:
        cache_salt: of the job.
        variant: of the replica. Replicas of one deployment that compute with other files or another dtype have another
            one, so that they share no cached or paid prefixes. Empty: the salt is that of the job.
    """
    return hashlib.blake2b(cache_salt, key=variant, digest_size=_SALT_BYTES).digest() if variant else cache_salt


def _mac(bundle_format: int, manifest: bytes, worker_secret: str) -> bytes:
    message = b"millrace model bundle\0%d\0%b" % (bundle_format, manifest)
    return hmac.digest(worker_secret.encode(), message, "sha256")
