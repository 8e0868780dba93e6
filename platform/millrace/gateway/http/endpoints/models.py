"""GET /v1/models and /v1/models/{id}: the models that the key may use, in the format of the client's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.queries import ANTHROPIC_PAGE, read_anthropic_page
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
    query_names = ("after", *ANTHROPIC_PAGE)

    async def handle(self) -> None:
        key = await self.authenticate("models")
        visible = order_models(self.gateway.router.visible(key), [spec.name for spec in self.gateway.settings.models])
        names, has_more = self._choose_page(list(visible))
        models = [self.model_object(name, visible[name]) for name in names]
        if self.api_dialect is not ANTHROPIC:
            more = {"has_more": True} if has_more else {}
            return await self.respond_json(200, {"object": "list", "data": models, **more})
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        await self.respond_json(200, {"data": models, "has_more": has_more, **ends})

    def _choose_page(self, names: list[str]) -> tuple[list[str], bool]:
        """Return the names of the query's page, which is all names by default, and whether there are more.

        Raises:
            ApiError: 400, the page is invalid, or begins at a model that the key may not use.
        """
        query = dict(self.query)
        if "after" in query:  # the name of OpenAI's lists
            query.setdefault("after_id", query["after"])
        limit = read_anthropic_page(query, max(1, min(len(names), 1000)))
        for name in ("after_id", "before_id"):
            if name in query and query[name] not in names:
                raise invalid(name if name in self.query else "after", f"There is no model {query[name]!r}.")
        if "before_id" in query:
            names = names[: names.index(query["before_id"])]
            return names[-limit:], len(names) > limit
        names = names[names.index(query["after_id"]) + 1 :] if "after_id" in query else names
        return names[:limit], len(names) > limit


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
        "sampling_defaults": dict(model.sampling_defaults),
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
