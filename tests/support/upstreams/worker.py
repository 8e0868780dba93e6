"""The inference worker with the secrets of UPSTREAM_SECRETS, a JSON object of credential ids and secrets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from inference_worker.__main__ import main
from inference_worker.contract.settings import ModelSpec
from inference_worker.worker import worker
from inference_worker.worker.engine_client import Deliver
from inference_worker.worker.relay.relay import Relay


class GivenSecrets:
    def secret(self, credential_id: int) -> str:
        return str(json.loads(os.environ["UPSTREAM_SECRETS"])[str(credential_id)])

    def max_concurrency(self, credential_id: int) -> int | None:
        return None


class RelayWithSecrets(Relay):
    """A relay that reads secrets from the environment."""

    def __init__(
        self, spec: ModelSpec, _: Any, deliver: Deliver, on_broken: Callable[[], None], broker: Any = None
    ) -> None:
        super().__init__(spec, GivenSecrets(), deliver, on_broken, broker)


worker.Relay = RelayWithSecrets  # type: ignore[misc]
main()
