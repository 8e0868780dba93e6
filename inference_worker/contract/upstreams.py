"""Deployments that another server runs: an OpenAI- or Anthropic-compatible API, or a managed child of the worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec

# The origin of an execution's token counts: Millrace's engine, the upstream's own usage, or an estimate from the text.
UsageSource = Literal["engine", "upstream", "estimated"]
UpstreamOperation = Literal["chat", "messages", "completions", "embeddings"]


class UpstreamEngine(StrEnum):
    """The protocol of an upstream."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    MANAGED = "managed"  # an OpenAI-compatible server that the worker starts and supervises


@dataclass(frozen=True)
class UpstreamSpec:
    """The upstream of a deployment, and what its model supports."""

    engine: UpstreamEngine
    base_url: str  # with the version, such as https://api.openai.com/v1; empty for a managed engine
    model: str  # the model's name at the upstream
    preset: str = ""  # a name in `PRESETS` (upstream_presets.py): authentication, parameters and defaults
    credential: int | None = None  # the id of an UpstreamCredential, never its secret
    allow_internal: bool = False  # the base URL may resolve to private addresses
    concurrency: int = 256  # maximum concurrent requests of one replica
    command: str = ""  # template of a managed engine's command
    context_length: int = 131_072  # tokens of prompt and completion
    images: bool = False
    tools: bool = True
    reasoning: bool = False
    task: Literal["generate", "embed"] = "generate"
    dimensions: int | None = None  # numbers of a vector, if the task is "embed"
    # Of a managed engine's command (managed_commands.py). It is no part of the identity of what a replica loads.
    signature: str = field(default="", repr=False, compare=False)

    @property
    def protocol(self) -> UpstreamEngine:
        """Return the protocol of the requests; that of a managed engine is OpenAI's."""
        return UpstreamEngine.ANTHROPIC if self.engine == UpstreamEngine.ANTHROPIC else UpstreamEngine.OPENAI

    @property
    def is_internal(self) -> bool:
        """Return whether the server may be in the operator's network, so that it must not fetch URLs of tenants."""
        return self.allow_internal or self.engine == UpstreamEngine.MANAGED


class UpstreamRequest(msgspec.Struct, frozen=True):
    """The request that a relay sends for an execution. It has no secret."""

    operation: UpstreamOperation
    body: bytes  # a JSON object, without the fields that the relay sets: `model` and `stream`
    prompt_tokens: int  # an upper bound of the prompt's tokens, which the reservation has
    estimated_tokens: int  # the expected number of the prompt's tokens, billed if the upstream sends no usage
    # Whether to wait for a rate limit or a busy upstream until the deadline. Otherwise the next target is tried.
    waits_for_capacity: bool = True
