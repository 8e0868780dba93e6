"""The results of prompt processes: data that cannot be encoded is an error of the request, not of the process."""

from __future__ import annotations

import json

import msgspec
import pytest

from millrace.gateway.prompt_processes.prompt_frames import Result
from millrace.gateway.prompt_processes.prompt_process import encode_result
from millrace.gateway.protocols.anthropic import messages
from millrace.gateway.protocols.dialect_readers import READERS


@pytest.mark.parametrize(("number", "code"), [(5, None), (-(10**29), "invalid_value")])
def test_an_integer_of_more_than_64_bits_is_an_error_of_the_request(number: int, code: str | None) -> None:
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {"n": {"default": number}}}}
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    request = READERS[messages.DIALECT](json.dumps(body).encode())
    decoded = msgspec.msgpack.decode(encode_result(Result(0, request=request)))
    problem = decoded["problem"] if isinstance(decoded, dict) else decoded[1]
    assert (problem and (problem["code"] if isinstance(problem, dict) else problem[0])) == code
