"""vLLM's endpoints for evaluation tools: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints.inference import PromptConsumer, ignored_headers
from millrace.gateway.protocols.openai.parameters import read_body
from millrace.gateway.protocols.tokenization import DIALECT, DetokenizeBody
from tenants.keys.snapshot import ApiKeySnapshot


class _TokenizationConsumer(PromptConsumer):
    """Base class of endpoints whose bodies may leave out the model."""

    async def read_body(self) -> bytes:
        body = await super().read_body()
        text, model = body.lstrip(), None if self.key is None else _default_model(self, self.key)
        if model is None or not text.startswith(b"{"):
            return body
        separator = b"" if text[1:].lstrip().startswith(b"}") else b","
        # A `model` in the body comes later and replaces this one.
        return b'{"model":%s%s%s' % (msgspec.json.encode(model.name), separator, text[1:])


class Tokenize(_TokenizationConsumer):
    endpoint = "tokenize"
    reader = DIALECT

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        request = await self.read_request(key)
        model = self.gateway.router.measure(key, request.model)
        _require_tokenizer(model)
        ids = (await self.gateway.service.tokenize(key, request)).ids
        answer = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids}
        if request.echoed_parameters["return_token_strs"]:
            _check_length("return_token_strs", ids, model)
            answer["token_strs"] = await asyncio.to_thread(_token_strs, ids, model)
        await self.respond_json(200, answer, ignored_headers(request.analysis.ignored))


class Detokenize(_TokenizationConsumer):
    endpoint = "detokenize"
    reader = DIALECT

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        parsed = read_body(await self.read_body(), DetokenizeBody, {})
        model = self.gateway.router.measure(key, parsed.model)
        ids = parsed.tokens
        _check_length("tokens", ids, model)
        if ids and not 0 <= min(ids) <= max(ids) < model.vocab_size:
            raise invalid("tokens", f"Token ids of this model are from 0 to {model.vocab_size - 1}.")
        text = await asyncio.to_thread(model.tokenizer.decode, ids, skip_special_tokens=False)
        await self.respond_json(200, {"prompt": text})


class TokenizerInfo(HttpConsumer):
    """The configuration of a model's tokenizer: of the query's `model`, or of the key's first chat model."""

    endpoint = "tokenizer_info"
    method = "GET"
    query_names = ("model",)

    async def handle(self) -> None:
        key = await self.authenticate("inference")
        name = self.query.get("model")
        if name is not None:
            model = self.gateway.router.measure(key, name)
        else:
            default_model = _default_model(self, key)
            if default_model is None:
                raise ApiError("model_not_found", "Your key may not use any model that generates text.", "model")
            model = default_model
        _require_tokenizer(model)
        await self.respond_json(200, await asyncio.to_thread(_tokenizer_info, model))


def _default_model(consumer: HttpConsumer, key: ApiKeySnapshot) -> ServedModel | None:
    """Return the key's first model that generates text."""
    visible = consumer.gateway.router.visible(key).values()
    return next((each for each in visible if each.task == "generate"), None)


def _require_tokenizer(model: ServedModel) -> None:
    """Check that the model's tokenizer is known.

    Raises:
        ApiError: 400, an upstream runs the model.
    """
    if model.upstream is not None:
        model.tokenizer.encode("")


def _check_length(parameter: str, ids: Sequence[int], model: ServedModel) -> None:
    """Check that decoding takes a short time, since it stops the gateway's other work.

    Raises:
        ApiError: 400, there are more tokens than the model's context has.
    """
    if len(ids) > model.context_length:
        raise invalid(parameter, f"At most {model.context_length} tokens are decoded in one request, not {len(ids)}.")


def _token_strs(ids: Sequence[int], model: ServedModel) -> list[str]:
    return [model.tokenizer.spell(token_id).decode("utf-8", "replace") for token_id in ids]


def _tokenizer_info(model: ServedModel) -> dict[str, Any]:
    path = model.directory / "tokenizer_config.json"
    info: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    template = model.directory / "chat_template.jinja"
    if template.exists():
        info["chat_template"] = template.read_text(encoding="utf-8")
    info.pop("name_or_path", None)  # a path of the machine on which the model was made
    return info
