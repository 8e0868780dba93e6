"""Which way: the ordered candidates for a logical model name.

The tenant's routing policy will stand behind `Router`; so far a name stands for the deployment of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.gateway.catalogue import ServedModel
from millrace.gateway.errors import ApiError
from tenants.snapshot import KeySnapshot


@dataclass(frozen=True)
class Candidate:
    """A deployment that may serve the request, and the price version that would be charged."""

    model: ServedModel
    price_version: int | None = None


class Router:
    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models

    def visible(self, key: KeySnapshot) -> list[ServedModel]:
        """The models this key may use."""
        return [model for model in self._models.values() if key.models is None or model.name in key.models]

    def candidates(self, key: KeySnapshot, name: str) -> list[Candidate]:
        """Where a request for the model `name` may go, best first; never empty.

        Raises:
            ApiError: 404 if there is no such model, 403 if this key may not use it.
        """
        if name not in self._models:
            raise ApiError(
                "model_not_found", f"The model {name!r} does not exist or you do not have access to it.", "model"
            )
        if key.models is not None and name not in key.models:
            raise ApiError("model_not_allowed", f"This API key may not use the model {name!r}.", "model")
        return [Candidate(self._models[name])]
