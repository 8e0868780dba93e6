"""A caller's trace is gone on with, or a new one is begun; nothing else in the header gets anywhere."""

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
def test_a_trace_goes_on_under_a_span_of_our_own(header: str) -> None:
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
def test_without_one_a_trace_begins(header: bytes | None) -> None:
    assert TRACE not in tracing.continue_trace(header)


@given(st.binary(max_size=80))
@example(f"00-{TRACE}-{PARENT}-01".encode())
def test_whatever_comes_what_goes_on_is_well_formed(header: bytes) -> None:
    assert re.fullmatch(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]", tracing.continue_trace(header))


def test_lines_of_the_request_name_it() -> None:
    structlog.contextvars.clear_contextvars()
    tracing.begin("req_1", f"00-{TRACE}-{PARENT}-01".encode())
    assert structlog.contextvars.get_contextvars() == {"request_id": "req_1", "trace_id": TRACE}
    assert trace_id(tracing.current()) == TRACE
    structlog.contextvars.clear_contextvars()
