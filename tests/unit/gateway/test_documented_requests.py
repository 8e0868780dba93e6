"""OpenAI's documented requests are accepted, or refused by name; documented answers can be sent back."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.protocols.openai.chat import read_chat
from millrace.gateway.protocols.responses.body import read_response
from millrace.gateway.protocols.upstreams.images import require_images

FILE = Path(__file__).parents[2] / "data" / "api_specs" / "openai_doc_examples.jsonl.gz"
READERS = {"/chat/completions": read_chat, "/responses": read_response}
# Path and title -> the error's param, or the ignored fields.
OUTCOMES: dict[tuple[str, str], str | set[str]] = {
    ("/chat/completions", "Default"): set(),
    ("/chat/completions", "Image input"): "messages[0].content[1].type",
    ("/chat/completions", "Functions"): set(),
    ("/chat/completions", "Logprobs"): set(),
    ("/responses", "Text input"): set(),
    ("/responses", "Image input"): "input[0].content[1].type",
    ("/responses", "Web search"): {"tools[].web_search_preview"},
    ("/responses", "File search"): {"tools[].file_search"},
    ("/responses", "Functions"): set(),
}


def examples() -> list[dict[str, Any]]:
    lines = gzip.decompress(FILE.read_bytes()).decode().splitlines()
    found = [json.loads(line) for line in lines]
    return [each for each in found if each["method"] == "post" and each["path"] in READERS]


def body_of(curl: str) -> bytes:
    match = re.search(r"-d '(.*)'", curl, re.S)
    assert match is not None
    return match.group(1).encode()


def without_dots(text: str) -> Any:
    """Parse an example after removing dots and trailing commas, which make some examples invalid JSON."""
    return json.loads(re.sub(r",(\s*[}\]])", r"\1", re.sub(r",\s*\{ \.\.\. \}", "", text)))


def test_every_example_has_an_outcome() -> None:
    assert {(each["path"], each["title"]) for each in examples()} == OUTCOMES.keys()


@pytest.mark.parametrize("example", examples(), ids=lambda each: f"{each['path']} {each['title']}")
def test_documented_requests(example: dict[str, Any]) -> None:
    outcome = OUTCOMES[example["path"], example["title"]]
    read, body = READERS[example["path"]], body_of(example["request_curl"])
    if isinstance(outcome, str):
        with pytest.raises(ApiError) as exc_info:
            require_images(read(body), is_supported=False)
        assert (exc_info.value.status, exc_info.value.param) == (400, outcome)
    else:
        assert set(read(body).analysis.ignored) == outcome


@pytest.mark.parametrize("example", examples(), ids=lambda each: f"{each['path']} {each['title']}")
def test_documented_answers_can_be_sent_back(example: dict[str, Any]) -> None:
    answer = without_dots(example["response"])
    request: InferenceRequest
    if example["path"] == "/chat/completions":
        message = answer["choices"][0]["message"]
        calls = [
            {"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message.get("tool_calls") or ()
        ]
        messages = [{"role": "user", "content": "?"}, message, *calls]
        request = read_chat(json.dumps({"model": "m", "messages": messages}).encode())
    else:
        items = [{"role": "user", "content": "?"}, *answer["output"]]
        request = read_response(json.dumps({"model": "m", "input": items}).encode())
    assert request.analysis.unknown == ()
    assert [message["role"] for message in request.prompt[:2]] == ["user", "assistant"]
