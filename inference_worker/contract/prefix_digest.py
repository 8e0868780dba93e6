"""Hashes of prompt blocks, and digests of replicas' prefix caches, by which gateways predict cache hits.

A block's hash depends on its tokens, all blocks before it, and a salt of the tenant and the replica's variant
(inference_worker.contract.model_bundles). A digest contains 4 bytes of the hash of each cached block; of a large cache
only every `rate`-th hash, selected by its value. Workers store digests in Valkey in `millrace:prefixes:<replica>`,
which expires. A heartbeat has the version of its replica's digest, so that gateways read only digests that changed.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from inference_worker.contract.model_bundles import derive_salt

HASH_BYTES = 32
MAX_DIGEST_HASHES = 8192
MAX_PREDICTED_BLOCKS = 1024  # blocks of a prompt that are compared
DIGEST_SECONDS = 1.0  # between digests of a replica whose cache changes
DIGEST_TTL_SECONDS = 60
NO_DIGEST = 0  # as the version of a replica's digest
_SAMPLE, _STORED = slice(0, 4), slice(4, 8)  # bytes of a hash


class PrefixDigest(msgspec.Struct, frozen=True):
    """The cached blocks of a replica."""

    block_size: int
    rate: int  # a power of two
    hashes: bytes  # 32-bit integers, little-endian, increasing if the digest has a version
    variant: bytes = b""  # what distinguishes the replica (Machine.variant)
    version: int = NO_DIGEST  # increases with each change; NO_DIGEST: a worker of an earlier release


def digest_key(replica_id: str) -> str:
    return f"millrace:prefixes:{replica_id}"


def hash_block(parent: bytes | None, tokens: Sequence[int], salt: bytes) -> bytes:
    """Return the hash of a full block that follows the block `parent`. The salt enters only the hash of a first block.

    Without the salt, a tenant can neither find another tenant's blocks nor create blocks that the other would find.
    """
    key = hashlib.blake2b(salt, digest_size=HASH_BYTES).digest() if parent is None else parent
    return hashlib.blake2b(array("I", tokens).tobytes(), key=key, digest_size=HASH_BYTES).digest()


def make_digest(block_size: int, hashes: Sequence[bytes]) -> PrefixDigest:
    """Return the digest of the blocks with these hashes, without a version."""
    rate = 1
    while len(hashes) > MAX_DIGEST_HASHES:
        rate *= 2
        hashes = [each for each in hashes if _is_sampled(each, rate)]
    return PrefixDigest(block_size, rate, _sort(b"".join(each[_STORED] for each in hashes)).tobytes())


class _ReplicaBlocks(NamedTuple):
    """A digest in the form that predictions use."""

    block_size: int
    variant: bytes
    rate: int
    hashes: array[int]  # increasing

    def has(self, block_hash: bytes) -> bool:
        """Return whether the digest contains the hash."""
        value = int.from_bytes(block_hash[_STORED], "little")
        place = bisect_left(self.hashes, value)
        return place < len(self.hashes) and self.hashes[place] == value


class PrefixIndex:
    """The last digests of replicas.

    A digest is one sorted array of integers. A set with an object for each hash would take milliseconds to create.
    """

    def __init__(self) -> None:
        self._known: dict[str, _ReplicaBlocks] = {}  # by replica ID
        self._versions: dict[str, int] = {}  # versions of these digests
        self.version = 0  # increases when a digest changes

    def find_changed(self, versions: Mapping[str, int | None]) -> list[str]:
        """Return the replicas whose digests must be read, by the versions that their heartbeats report.

        None is the version of a worker of an earlier release, whose digest is read each time.
        """
        return [
            replica_id
            for replica_id, version in versions.items()
            if version is None or version != self._versions.get(replica_id, NO_DIGEST)
        ]

    def retain(self, replica_ids: Collection[str]) -> None:
        """Forget the digests of all other replicas."""
        for replica_id in self._versions.keys() - set(replica_ids):
            self._forget(replica_id)

    def update(self, payloads: Mapping[str, bytes | None]) -> None:
        """Replace the digests of these replicas; None: it has none."""
        for replica_id, payload in payloads.items():
            if payload is None:
                self._forget(replica_id)
            else:
                self._read(replica_id, payload)

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
                    elif known.has(block_hash):
                        found[replica_id] = number * block_size
                        left.append(replica_id)
                matching = left
                if not matching:
                    break
        return found

    def _read(self, replica_id: str, payload: bytes) -> None:
        try:
            digest = decode_digest(payload)
            if digest.version != NO_DIGEST and digest.version == self._versions.get(replica_id):
                return
            known = _read_blocks(digest)
        except (msgspec.MsgspecError, ValueError):  # of another version
            self._forget(replica_id)
            return
        self._versions[replica_id] = digest.version
        if self._known.get(replica_id) != known:  # a worker of an earlier release sends each digest many times
            self._known[replica_id] = known
            self.version += 1

    def _forget(self, replica_id: str) -> None:
        if self._versions.pop(replica_id, None) is not None:
            del self._known[replica_id]
            self.version += 1


def _read_blocks(digest: PrefixDigest) -> _ReplicaBlocks:
    """Return the digest in the form that predictions use.

    Raises:
        ValueError: it has no valid block size or rate, or a part of a hash.
    """
    if digest.block_size <= 0 or digest.rate <= 0:
        raise ValueError("a digest has a positive block size and rate")
    hashes = _sort(digest.hashes) if digest.version == NO_DIGEST else array("I", digest.hashes)
    return _ReplicaBlocks(digest.block_size, digest.variant, digest.rate, hashes)


def _sort(hashes: bytes) -> array[int]:
    return array("I", sorted(array("I", hashes)))


def _chain(tokens: Sequence[int], block_size: int, salt: bytes) -> Iterator[bytes]:
    parent: bytes | None = None
    for number in range(min((len(tokens) - 1) // block_size, MAX_PREDICTED_BLOCKS)):
        parent = hash_block(parent, tokens[number * block_size : (number + 1) * block_size], salt)
        yield parent


def _is_sampled(block_hash: bytes, rate: int) -> bool:
    return int.from_bytes(block_hash[_SAMPLE], "little") % rate == 0


decode_digest = msgspec.msgpack.Decoder(PrefixDigest).decode
