"""The question of a request: the text of its last user message, by which its complexity is scored."""

from __future__ import annotations

from millrace.gateway.core.types import InferenceRequest
from tenants.routing_policies.complexity import MAX_TEXT


def question_of(request: InferenceRequest) -> str:
    """Return the start of the last user message, or of a prompt without messages; empty if it has no text."""
    if request.analysis.tokenized is not None:
        return request.analysis.question
    if isinstance(request.prompt, str):
        return request.prompt[:MAX_TEXT]
    for message in reversed(request.prompt):
        if not isinstance(message, dict):
            return ""  # token IDs
        if message.get("role") == "user":
            content = message.get("content")
            return content[:MAX_TEXT] if isinstance(content, str) else ""
    return ""
