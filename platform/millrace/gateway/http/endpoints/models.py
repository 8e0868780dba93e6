"""GET /v1/models and /v1/models/{id}: the models that the key may use, in the format of the client's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.protocols.dialects import ANTHROPIC, Dialect, requested_dialect


class ModelConsumer(HttpConsumer):
    """Base class of the endpoints of models."""

    endpoint = "models"
    method = "GET"

    def choose_dialect(self) -> Dialect:
        return requested_dialect(self.scope["path"], self.headers)

    def model_object(self, name: str, model: ServedModel) -> dict[str, Any]:
        return _anthropic_model(name, model) if self.api_dialect is ANTHROPIC else _openai_model(name, model)


class ModelsEndpoint(ModelConsumer):
    async def handle(self) -> None:
        key = await self.authenticate("models")
        visible = order_models(self.gateway.router.visible(key), [spec.name for spec in self.gateway.settings.models])
        models = [self.model_object(name, model) for name, model in visible.items()]
        if self.api_dialect is not ANTHROPIC:
            return await self.respond_json(200, {"object": "list", "data": models})
        names = [model["id"] for model in models] or [None]
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        await self.respond_json(200, {"data": models, **ends})


def order_models(models: Mapping[str, ServedModel], configured: Sequence[str]) -> dict[str, ServedModel]:
    """Return the models with those that generate text first, and among them in the order of the settings.

    Many clients and examples use the first model of the list for a chat.
    """
    places = {name: place for place, name in enumerate(configured)}

    def place(item: tuple[str, ServedModel]) -> tuple[bool, int]:
        name, model = item
        return model.task != "generate", places.get(name, len(places))

    return dict(sorted(models.items(), key=place))


class ModelEndpoint(ModelConsumer):
    async def handle(self) -> None:
        key = await self.authenticate("models")
        name = self.path_arguments["name"]
        if (model := self.gateway.router.visible(key).get(name)) is not None:
            return await self.respond_json(200, self.model_object(name, model))
        raise ApiError(
            "model_not_found", f"The model {name!r} does not exist or you do not have access to it.", "model"
        )


def _openai_model(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "millrace",
        "context_length": model.context_length,
    }


def _anthropic_model(name: str, model: ServedModel) -> dict[str, Any]:
    created_at = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created_at,
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
        "max_tokens": model.context_length if model.task == "generate" else None,
    }
