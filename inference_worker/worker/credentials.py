"""The upstream credentials of a worker process. They are only in its memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import redis
import structlog
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from inference_worker.contract.credentials import (
    BOX_TTL_SECONDS,
    WORKER_KEY_TTL_SECONDS,
    WORKER_KEYS_KEY,
    SealedContents,
    WorkerKey,
    encode_worker_key,
    sealed_credentials_name,
    unseal,
    worker_key_name,
)
from inference_worker.contract.messages import WORK_CHANNEL
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.upstreams import UpstreamEngine
from inference_worker.worker.periodic_thread import PeriodicThread

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.5


class MissingCredential(LookupError):
    """An error for a credential that this process does not have, or not yet."""


class CredentialNeeds(NamedTuple):
    """The credentials that a process needs."""

    credentials: tuple[int, ...]  # ids of the platform's credentials
    deployments: tuple[str, ...]  # for which tenants may have their own credentials


def needs_of(specs: Collection[ModelSpec]) -> CredentialNeeds:
    """Return the credentials that the deployments of a process need."""
    upstreams = [
        (spec.name, spec.upstream)
        for spec in specs
        if spec.upstream is not None and spec.upstream.engine != UpstreamEngine.MANAGED
    ]
    ids = {upstream.credential for _, upstream in upstreams if upstream.credential is not None}
    return CredentialNeeds(tuple(sorted(ids)), tuple(sorted({name for name, _ in upstreams})))


class CredentialStore:
    """The secrets that the platform has sealed to this process, and the thread that receives them.

    The thread publishes the process's public key while a deployment needs credentials. Thread-safe.
    """

    def __init__(
        self, broker: redis.Redis, process_id: str, worker_secret: str, needs: Callable[[], CredentialNeeds]
    ) -> None:
        self._broker = broker
        self._process_id = process_id
        self._worker_secret = worker_secret
        self._needs = needs
        self._private_key = X25519PrivateKey.generate()
        self._payload: bytes | None = None
        self._contents = SealedContents({})
        self._is_published = False
        self._thread = PeriodicThread("credentials", self.synchronize, POLL_SECONDS)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, forget the secrets, and remove the process's public key and box."""
        self._thread.close()
        self._contents = SealedContents({})
        try:
            self._withdraw()
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))

    def secret(self, credential_id: int) -> str:
        """Return the secret of a credential.

        Raises:
            MissingCredential: it was not received, or was removed.
        """
        try:
            return self._contents.secrets[credential_id]
        except KeyError:
            raise MissingCredential(f"the upstream credential {credential_id} was not received yet") from None

    def max_concurrency(self, credential_id: int) -> int | None:
        """Return the maximum number of concurrent requests of all replicas; None: no limit."""
        return self._contents.max_concurrency.get(credential_id)

    def synchronize(self) -> None:
        """Publish the public key, and read the box. The thread does it twice a second.

        Raises:
            redis.RedisError: Valkey cannot be reached.
        """
        needs = self._needs()
        if not needs.deployments:
            self._withdraw()
            self._replace(SealedContents({}))
            return
        key = WorkerKey(self._process_id, self._private_key.public_key().public_bytes_raw(), *needs)
        name = sealed_credentials_name(self._process_id)
        with self._broker.pipeline(transaction=False) as pipe:
            pipe.set(
                worker_key_name(self._process_id),
                encode_worker_key(key, self._worker_secret),
                ex=WORKER_KEY_TTL_SECONDS,
            )
            pipe.sadd(WORKER_KEYS_KEY, self._process_id)
            pipe.get(name)
            pipe.expire(name, BOX_TTL_SECONDS)
            if not self._is_published:
                pipe.publish(WORK_CHANNEL, "")
            payload: bytes | None = pipe.execute()[2]
        self._is_published = True
        if payload is None or payload == self._payload:  # if Valkey has lost the box, the last one applies
            return
        try:
            self._replace(unseal(payload, self._process_id, self._private_key))
        except ValueError as exc:
            log.warning("credentials_unreadable", error=str(exc))
        self._payload = payload

    def _replace(self, contents: SealedContents) -> None:
        if contents == self._contents:
            return
        self._contents = contents
        log.info("credentials_received", count=len(contents.secrets))

    def _withdraw(self) -> None:
        if not self._is_published:
            return
        self._broker.delete(worker_key_name(self._process_id), sealed_credentials_name(self._process_id))
        self._broker.srem(WORKER_KEYS_KEY, self._process_id)
        self._is_published, self._payload = False, None
