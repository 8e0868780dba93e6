"""Managed engines: a server of the worker, and the relay that sends it the requests of a deployment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from inference_worker.contract.managed_commands import is_signed
from inference_worker.contract.settings import ModelSpec
from inference_worker.worker.engine_client import Deliver
from inference_worker.worker.managed.server import ManagedServer, ManagedServerError
from inference_worker.worker.relay.relay import Relay
from inference_worker.worker.relay.request_encoder import UpstreamSecrets


class ManagedEngine(Relay):
    """A relay to a server that ends with the relay."""

    def __init__(
        self,
        spec: ModelSpec,
        server: ManagedServer,
        secrets: UpstreamSecrets,
        deliver: Deliver,
        on_broken: Callable[[], None],
    ) -> None:
        if spec.upstream is None:
            raise AssertionError("the deployment has an upstream")
        self._server = server
        upstream = replace(spec.upstream, base_url=server.base_url, credential=None, allow_internal=True)
        super().__init__(replace(spec, upstream=upstream), secrets, deliver, on_broken, api_key=server.api_key)

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Call `on_failure` once, in a thread, if the server fails."""
        self._server.watch(on_failure)

    def close(self) -> None:
        super().close()
        self._server.stop()


def start_server(
    spec: ModelSpec,
    *,
    programs: Sequence[str],
    worker_secret: str,
    logs: Path,
    is_abandoned: Callable[[], bool],
) -> ManagedServer:
    """Start the server of a managed deployment, and wait until it is healthy.

    Raises:
        ManagedServerError: it cannot be started, or the deployment was not signed by the platform.
    """
    if spec.upstream is None:
        raise AssertionError("the deployment has an upstream")
    if not is_signed(spec.name, spec.upstream, spec.upstream.signature, worker_secret):
        raise ManagedServerError(
            "The command was not signed with this worker's MILLRACE_WORKER_SECRET. Set the platform's secret."
        )
    server = ManagedServer(spec.name, spec.upstream, programs, logs)
    server.start()
    server.wait_until_healthy(is_abandoned)
    return server
