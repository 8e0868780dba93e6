"""Bodies of vLLM's POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec

from inference_worker.contract.request import SamplingParams
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import InferenceRequest, TemplateOptions
from millrace.gateway.protocols.foreign_tools import adapt_chat
from millrace.gateway.protocols.openai.chat import ChatFunctionTool, function_tools
from millrace.gateway.protocols.openai.messages import Message, count_parts, template_messages
from millrace.gateway.protocols.openai.parameters import read_request

DIALECT = "vllm.tokenize"


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ChatFunctionTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    tokens: list[int]


def read_tokenize(body: bytes) -> InferenceRequest:
    """Parse a body of /tokenize.

    Raises:
        ApiError: 400 that names the parameter.
    """
    parsed, ignored = read_request(body, TokenizeBody, {}, (), adapt=adapt_chat)
    if (parsed.prompt is None) == (not parsed.messages):
        raise invalid("prompt", "Set either prompt or messages.")
    messages = parsed.messages or []
    return InferenceRequest(
        analysis=ignored.make_analysis(parts=count_parts(messages)),
        model=parsed.model,
        prompt=template_messages(messages) if parsed.prompt is None else parsed.prompt,
        sampling=SamplingParams(),
        tools=function_tools(parsed.tools),
        template=TemplateOptions(
            continues=bool(parsed.continue_final_message),
            adds_prompt=parsed.add_generation_prompt is not False,
            variables=parsed.chat_template_kwargs or {},
            special_tokens=parsed.add_special_tokens,
        ),
        echoed_parameters={"return_token_strs": bool(parsed.return_token_strs)},
    )
