"""POST /v1/chat/completions, in: OpenAI's body to the internal form."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.gateway.errors import ApiError, invalid
from millrace.gateway.forms import InferenceRequest
from millrace.gateway.openai.parameters import Common, check_common, read_body, sampling_params

DIALECT = "openai.chat"


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    refusal: None = None  # assistant messages sent back as they came
    annotations: list[Any] | None = None


class ChatBody(Common):
    messages: list[Message]
    max_completion_tokens: int | None = None


def read_chat(body: bytes) -> InferenceRequest:
    """The internal form of a chat completion's body.

    Raises:
        ApiError: 400 that names the parameter.
    """
    chat = read_body(body, ChatBody)
    check_common(chat)
    if not chat.messages:
        raise invalid("messages", "messages must hold at least one message.")
    if chat.max_completion_tokens is not None:
        if chat.max_tokens is not None and chat.max_tokens != chat.max_completion_tokens:
            raise invalid("max_tokens", "max_tokens is an older name of max_completion_tokens: set one of them.")
        if chat.max_completion_tokens < 1:
            raise invalid("max_completion_tokens", "max_completion_tokens must be at least 1.")
    options = chat.stream_options
    return InferenceRequest(
        model=chat.model,
        prompt=[_template_message(index, message) for index, message in enumerate(chat.messages)],
        sampling=sampling_params(chat),
        max_tokens=chat.max_completion_tokens or chat.max_tokens,
        cache_key=chat.prompt_cache_key,
        stream=bool(chat.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )


def _template_message(index: int, message: Message) -> dict[str, Any]:
    if message.annotations:
        raise ApiError("unsupported_parameter", "Annotations are not supported.", f"messages[{index}].annotations")
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    # `developer` is OpenAI's newer name of what models' templates call `system`.
    return {"role": "system" if message.role == "developer" else message.role, "content": text}
