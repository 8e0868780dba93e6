"""Anthropic's endpoints: messages and token counting."""

from __future__ import annotations

from millrace.gateway.core.errors import invalid
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints.inference import InferenceConsumer, PromptConsumer, ignored_headers
from millrace.gateway.protocols.anthropic import messages
from millrace.gateway.protocols.dialect_readers import COUNT
from millrace.gateway.protocols.dialects import ANTHROPIC

# Anthropic accepts no sampling parameters in the newest version. This gateway accepts them in all versions.
VERSIONS = ("2026-10-21", "2023-06-01", "2023-01-01")


class Messages(InferenceConsumer):
    endpoint = "messages"
    api_dialect = ANTHROPIC
    dialect = reader = messages.DIALECT

    async def handle(self) -> None:
        _check_version(self)
        await super().handle()


class CountTokens(PromptConsumer):
    endpoint = "messages.count_tokens"
    reader = COUNT
    api_dialect = ANTHROPIC

    async def handle(self) -> None:
        _check_version(self)
        key = await self.authenticate("inference")
        request = await self.read_request(key)
        count = await self.gateway.service.count(key, request)
        await self.respond_json(200, {"input_tokens": count}, ignored_headers(request.analysis.ignored))


def _check_version(consumer: HttpConsumer) -> None:
    version = consumer.headers.get(b"anthropic-version")
    if version is not None and version.decode("latin-1") not in VERSIONS:
        raise invalid("anthropic-version", f"anthropic-version must be one of {', '.join(VERSIONS)}.")
