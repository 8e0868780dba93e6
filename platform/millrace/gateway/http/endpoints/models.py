"""GET /v1/models and /v1/models/{id}: the models that the key may use."""

from __future__ import annotations

from typing import Any

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.http.consumer import HttpConsumer


class ModelsEndpoint(HttpConsumer):
    endpoint = "models"
    method = "GET"

    async def handle(self) -> None:
        key = await self.authenticate("models")
        models = [_model_object(name, model) for name, model in self.gateway.router.visible(key).items()]
        await self.respond_json(200, {"object": "list", "data": models})


class ModelEndpoint(HttpConsumer):
    endpoint = "models"
    method = "GET"

    async def handle(self) -> None:
        key = await self.authenticate("models")
        name = self.path_arguments["name"]
        if (model := self.gateway.router.visible(key).get(name)) is not None:
            return await self.respond_json(200, _model_object(name, model))
        raise ApiError(
            "model_not_found", f"The model {name!r} does not exist or you do not have access to it.", "model"
        )


def _model_object(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "millrace",
        "context_length": model.context_length,
    }
