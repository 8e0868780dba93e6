"""Request bodies, and Hypothesis strategies for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from millrace.gateway.protocols.openai.chat import ChatBody
from millrace.gateway.protocols.openai.parameters import NO_OP

HELLO = [{"role": "user", "content": "Hello"}]
# The smallest bodies of the endpoints that generate text, and of the others, without the model.
BODIES: Mapping[str, dict[str, Any]] = {
    "openai.chat": {"messages": HELLO, "max_tokens": 12},
    "openai.completion": {"prompt": "Hello"},
    "openai.responses": {"input": "Hello"},
    "anthropic.messages": {"messages": HELLO, "max_tokens": 12},
    "openai.realtime": {"messages": HELLO, "type": "request", "id": "1"},
}
ENCODERS: Mapping[str, dict[str, Any]] = {
    "openai.embedding": {"input": "Hello"},
    "cohere.rerank": {"query": "a", "documents": ["b"]},
    "vllm.score": {"text_1": "a", "text_2": "b"},
    "vllm.tokenize": {"prompt": "Hello"},
    "anthropic.count": {"messages": HELLO},
}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_text_part = st.fixed_dictionaries(
    {"type": st.just("text"), "text": st.text()}, optional={"prompt_cache_breakpoint": ANY_JSON}
)
_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | ANY_JSON},
    optional={
        "content": st.text(max_size=5) | st.lists(_text_part, max_size=2) | ANY_JSON,
        "tool_calls": st.lists(
            st.builds(lambda text: called(text)["tool_calls"][0], st.text(max_size=4) | st.just("{}"))
        )
        | ANY_JSON,
        "tool_call_id": st.just("c") | ANY_JSON,
        "name": ANY_JSON,
    },
)
_format = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema"])},
    optional={
        "json_schema": st.fixed_dictionaries({"name": st.text()}, optional={"schema": ANY_JSON, "strict": ANY_JSON})
    },
)
LIKELY = {
    "messages": st.lists(_message, max_size=3),
    "prompt": st.text() | st.lists(st.text() | st.integers() | st.lists(st.integers(), max_size=2), max_size=3),
    "tools": st.lists(st.builds(tool, st.text(max_size=3), parameters=ANY_JSON, strict=ANY_JSON), max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | st.builds(named, st.text(max_size=3)),
    "response_format": _format,
    "logit_bias": st.dictionaries(
        st.integers().map(str) | st.text(max_size=3), st.floats() | st.integers(), max_size=2
    ),
    "stop": st.text() | st.lists(st.text(), max_size=5),
    "n": st.integers(),
    "seed": st.integers(),
    "temperature": st.floats() | st.integers(),
    "max_tokens": st.integers(),
    "logprobs": st.booleans() | st.integers(-1, 30),
    "echo": st.booleans(),
}
NAMES = st.sampled_from(sorted({*NO_OP, *ChatBody.__struct_fields__})) | st.text(max_size=8)
