"""Hashes of prompt blocks, and digests of replicas' prefix caches, by which gateways predict cache hits.

A block's hash depends on its tokens, all blocks before it, and a salt of the tenant and the replica's variant
(inference_worker.contract.model_bundles). A digest contains 4 bytes of the hash
of each cached block; of a large cache only every `rate`-th hash, selected by its value. Workers store digests in Valkey
in `millrace:prefixes:<replica>`, which expires.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from inference_worker.contract.model_bundles import derive_salt

HASH_BYTES = 32
MAX_DIGEST_HASHES = 8192
MAX_PREDICTED_BLOCKS = 1024  # blocks of a prompt that are compared
DIGEST_SECONDS = 1.0  # between digests of a replica whose cache changes
DIGEST_TTL_SECONDS = 60
_SAMPLE, _STORED = slice(0, 4), slice(4, 8)  # bytes of a hash


class PrefixDigest(msgspec.Struct, frozen=True):
    """The cached blocks of a replica."""

    block_size: int
    rate: int  # a power of two
    hashes: bytes
    variant: bytes = b""  # what distinguishes the replica (Machine.variant)


def digest_key(replica_id: str) -> str:
    return f"millrace:prefixes:{replica_id}"


def hash_block(parent: bytes | None, tokens: Sequence[int], salt: bytes) -> bytes:
    """Return the hash of a full block that follows the block `parent`. The salt enters only the hash of a first block.

    Without the salt, a tenant can neither find another tenant's blocks nor create blocks that the other would find.
    """
    key = hashlib.blake2b(salt, digest_size=HASH_BYTES).digest() if parent is None else parent
    return hashlib.blake2b(array("I", tokens).tobytes(), key=key, digest_size=HASH_BYTES).digest()


def make_digest(block_size: int, hashes: Sequence[bytes]) -> PrefixDigest:
    """Return the digest of the blocks with these hashes."""
    rate = 1
    while len(hashes) > MAX_DIGEST_HASHES:
        rate *= 2
        hashes = [each for each in hashes if _is_sampled(each, rate)]
    return PrefixDigest(block_size, rate, b"".join(each[_STORED] for each in hashes))


class _ReplicaBlocks(NamedTuple):
    """A digest in the form that predictions use."""

    block_size: int
    variant: bytes
    rate: int
    hashes: frozenset[bytes]


class PrefixIndex:
    """The last digests of replicas."""

    def __init__(self) -> None:
        self._payloads: dict[str, bytes] = {}
        self._known: dict[str, _ReplicaBlocks] = {}  # by replica ID
        self.version = 0  # increases when a digest changes

    def update(self, payloads: Mapping[str, bytes | None]) -> None:
        """Replace the digests of all replicas; None: it has none."""
        for replica_id in self._known.keys() - payloads.keys():
            self._forget(replica_id)
        for replica_id, payload in payloads.items():
            if payload is None:
                self._forget(replica_id)
            elif self._payloads.get(replica_id) != payload:
                self._payloads[replica_id] = payload
                self._read(replica_id, payload)
                self.version += 1

    def cached_tokens(self, tokens: Sequence[int], salt: bytes, replicas: Sequence[str]) -> dict[str, int]:
        """Return the predicted number of cached tokens of a prompt at each replica that has a digest.

        `salt` is that of the job. Only blocks that a replica may have are hashed, and the block of the last token is
        always computed.
        """
        found = {replica_id: 0 for replica_id in replicas if replica_id in self._known}
        for block_size, variant in {self._known[replica_id][:2] for replica_id in found}:
            matching = [replica_id for replica_id in found if self._known[replica_id][:2] == (block_size, variant)]
            for number, block_hash in enumerate(_chain(tokens, block_size, derive_salt(salt, variant)), 1):
                left = []
                for replica_id in matching:
                    known = self._known[replica_id]
                    if known.rate > 1 and not _is_sampled(block_hash, known.rate):
                        left.append(replica_id)
                    elif block_hash[_STORED] in known.hashes:
                        found[replica_id] = number * block_size
                        left.append(replica_id)
                matching = left
                if not matching:
                    break
        return found

    def _read(self, replica_id: str, payload: bytes) -> None:
        try:
            digest = decode_digest(payload)
        except msgspec.MsgspecError:  # of another version
            self._known.pop(replica_id, None)
            return
        hashes = digest.hashes
        found = frozenset(hashes[start : start + 4] for start in range(0, len(hashes), 4))
        if digest.block_size > 0 and digest.rate > 0:
            self._known[replica_id] = _ReplicaBlocks(digest.block_size, digest.variant, digest.rate, found)

    def _forget(self, replica_id: str) -> None:
        if self._payloads.pop(replica_id, None) is not None:
            self.version += 1
        self._known.pop(replica_id, None)


def _chain(tokens: Sequence[int], block_size: int, salt: bytes) -> Iterator[bytes]:
    parent: bytes | None = None
    for number in range(min((len(tokens) - 1) // block_size, MAX_PREDICTED_BLOCKS)):
        parent = hash_block(parent, tokens[number * block_size : (number + 1) * block_size], salt)
        yield parent


def _is_sampled(block_hash: bytes, rate: int) -> bool:
    return int.from_bytes(block_hash[_SAMPLE], "little") % rate == 0


decode_digest = msgspec.msgpack.Decoder(PrefixDigest).decode
