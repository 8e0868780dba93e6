"""Trace context: a caller's trace is continued or a new one started, and no other header content is used."""

from __future__ import annotations

import re

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st

from inference_worker.contract.messages import trace_id
from millrace.gateway.core import tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("header", [f"00-{TRACE}-{PARENT}-01", f"42-{TRACE}-{PARENT}-ff-what.comes.later"])
def test_a_trace_continues_with_a_new_span(header: str) -> None:
    version, trace, span, flags = tracing.continue_trace(header.encode()).split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    assert span not in (PARENT, "0" * 16)
    assert trace_id(tracing.continue_trace(header.encode())) == TRACE


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        f"00-{'0' * 32}-{PARENT}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        f"ff-{TRACE}-{PARENT}-01".encode(),
        f"00-{TRACE}-{PARENT}-01-more".encode(),
        f"00-{TRACE.upper()}-{PARENT}-01".encode(),
        f"00-{TRACE}-{PARENT}-01\n".encode(),
    ],
)
def test_without_a_header_a_new_trace_starts(header: bytes | None) -> None:
    assert TRACE not in tracing.continue_trace(header)


@given(st.binary(max_size=80))
@example(f"00-{TRACE}-{PARENT}-01".encode())
def test_any_header_gives_a_valid_trace(header: bytes) -> None:
    assert re.fullmatch(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]", tracing.continue_trace(header))


def test_log_lines_of_a_request_name_its_trace() -> None:
    structlog.contextvars.clear_contextvars()
    tracing.begin("req_1", f"00-{TRACE}-{PARENT}-01".encode())
    assert structlog.contextvars.get_contextvars() == {"request_id": "req_1", "trace_id": TRACE}
    assert trace_id(tracing.current_traceparent()) == TRACE
    structlog.contextvars.clear_contextvars()
