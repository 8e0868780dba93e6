"""Requests that do not fit the context: one code and text for each cause, in each dialect's words."""

from __future__ import annotations

import re

import msgspec
import pytest

from inference_worker.contract.request import SamplingParams
from millrace.gateway.admission.rejections import context_exceeded
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.protocols.dialects import ANTHROPIC, OPENAI, RESPONSES, Dialect

CONTEXT = 200
LIMIT_WORDS = re.compile(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")
PROMPT_WORDS = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "is_limit"),
    [
        (10, 300, True),
        (150, 51, True),
        (199, 2, True),
        (200, 1, False),
        (300, 5, False),
        (300, 900, False),
        (200, None, False),
    ],
)
@pytest.mark.parametrize("dialect", [OPENAI, RESPONSES, ANTHROPIC])
def test_each_cause_has_its_code_and_text(
    dialect: Dialect, prompt: int, max_tokens: int | None, is_limit: bool
) -> None:
    request = InferenceRequest("m", [{"role": "user", "content": ""}], SamplingParams(), max_tokens)
    error = context_exceeded(request, prompt, CONTEXT)
    assert error.code == "context_length_exceeded"  # fallbacks to a longer context react to it
    body = dialect.body(error, "req_1")["error"]
    message, code, param = body["message"], body.get("code"), body.get("param")
    if dialect is ANTHROPIC:
        found = (LIMIT_WORDS if is_limit else PROMPT_WORDS).match(message)
        assert found is not None
        numbers = (prompt, max_tokens, CONTEXT) if is_limit else (prompt, CONTEXT)
        assert tuple(map(int, found.groups())) == numbers
        return
    limit = "max_output_tokens" if dialect is RESPONSES else "max_tokens"
    assert (code, param) == (("invalid_value", limit) if is_limit else ("context_length_exceeded", "messages"))
    if is_limit:
        assert message.startswith(f"{limit} is too large: {max_tokens}.")
        assert message.endswith(f"at most {CONTEXT - prompt}.")
    assert ("maximum context length" in message) != is_limit  # clients shorten the prompt when they read it
    event = msgspec.json.decode(dialect.event(error, "req_1", 3))
    assert event.get("error", event)["code"] == code
