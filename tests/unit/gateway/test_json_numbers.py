"""Integers of requests that have more than 64 bits are floats, so that every encoder of the platform has them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.gateway.core.json_numbers import decode_json
from millrace.gateway.protocols.anthropic import messages
from millrace.gateway.protocols.dialect_readers import READERS, SOCKET
from millrace.gateway.protocols.openai import chat, completions
from millrace.gateway.protocols.responses import body as responses

LARGE = 10**29
HUGE = 10**400  # beyond the range of floats
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": LARGE, "minimum": -LARGE}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
HELLO = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "m", "messages": HELLO}
RESPONSE = {"model": "m", "input": "Hi"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (chat.DIALECT, CHAT | {"tools": [{"type": "function", "function": FUNCTION}]}),
    (chat.DIALECT, CHAT | {"tools": [{"type": "function", "function": FUNCTION, "added": LARGE}]}),
    (
        chat.DIALECT,
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
    (chat.DIALECT, CHAT | {"guided_json": json.dumps(SCHEMA)}),
    (chat.DIALECT, CHAT | {"chat_template_kwargs": {"n": LARGE}}),
    (SOCKET, CHAT | {"type": "chat", "guided_json": SCHEMA}),
    (completions.DIALECT, {"model": "m", "prompt": "Hi", "structured_outputs": {"json": SCHEMA}}),
    (responses.DIALECT, RESPONSE | {"tools": [{"type": "function", **FUNCTION, "output_schema": {"a": [LARGE]}}]}),
    (responses.DIALECT, RESPONSE | {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    (messages.DIALECT, CHAT | {"max_tokens": 5, "tools": [{"name": "f", "input_schema": SCHEMA}]}),
    (
        messages.DIALECT,
        CHAT | {"max_tokens": 5, "tools": [{"name": "f", "input_schema": {"type": "object", "n": HUGE}}]},
    ),
]


@pytest.mark.parametrize(("dialect", "body"), BODIES)
def test_a_request_with_large_integers_can_be_encoded(dialect: str, body: dict[str, Any]) -> None:
    request = READERS[dialect](json.dumps(body).encode())
    assert msgspec.msgpack.encode(request)
    assert msgspec.json.encode(request.echoed_parameters)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_values_are_kept_and_can_be_encoded(value: Any) -> None:
    decoded = decode_json(json.dumps(value))
    assert decoded == json.loads(json.dumps(value), parse_int=lambda digits: narrow(int(digits)))
    assert decode_json(msgspec.json.encode(decoded)) == decoded


def narrow(number: int) -> float:
    return number if -(2**63) <= number < 2**64 else float(number)
