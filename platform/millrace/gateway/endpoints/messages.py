"""Anthropic's endpoints: messages, and how many tokens they are."""

from __future__ import annotations

from millrace.gateway.anthropic import messages
from millrace.gateway.dialects import ANTHROPIC
from millrace.gateway.endpoints.inference import InferenceConsumer
from millrace.gateway.errors import invalid
from millrace.gateway.http import HttpConsumer

# The newest takes no sampling parameters at Anthropic's; here they are taken all the same.
VERSIONS = ("2026-10-21", "2023-06-01", "2023-01-01")


class Messages(InferenceConsumer):
    endpoint = "messages"
    words = ANTHROPIC
    dialect = messages.DIALECT
    read = staticmethod(messages.read_messages)

    async def handle(self, body: bytes) -> None:
        _check_version(self)
        await super().handle(body)


class CountTokens(HttpConsumer):
    endpoint = "messages.count_tokens"
    words = ANTHROPIC

    async def handle(self, body: bytes) -> None:
        _check_version(self)
        key = await self.authenticate("inference")
        count = await self.gateway.service.count(key, messages.read_count(body))
        await self.respond_json(200, {"input_tokens": count})


def _check_version(consumer: HttpConsumer) -> None:
    version = consumer.headers.get(b"anthropic-version")
    if version is not None and version.decode("latin-1") not in VERSIONS:
        raise invalid("anthropic-version", f"anthropic-version must be one of {', '.join(VERSIONS)}.")
