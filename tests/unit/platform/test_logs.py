"""Log lines of structlog and of the standard library, as text and as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import pytest
import structlog

from inference_worker.contract.logs import configure_logging


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """Return the lines on standard error of the loggers that a test configures."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for name in ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing"):
        monkeypatch.setattr(logging, name, getattr(logging, name))  # restored after the test
    structlog.contextvars.clear_contextvars()
    yield lambda: capsys.readouterr().err.splitlines()
    structlog.contextvars.clear_contextvars()
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_has_its_fields_in_order_and_quotes_unusual_texts(lines: Callable[[], list[str]]) -> None:
    configure_logging("info", "text")
    structlog.contextvars.bind_contextvars(request_id="req_1")
    structlog.get_logger("a.b").info("request", status="200", ms=4, empty="", text="two\nlines", escape="\x1b[1m")
    (line,) = lines()
    time, rest = line.split(" ", 1)
    assert time.endswith("Z")
    fields = r"empty='' escape='\x1b[1m' ms=4 request_id=req_1 status=200 text='two\nlines'"
    assert rest == f"[info     ] {'request':<30} [a.b] {fields}"


def test_a_traceback_follows_its_line(lines: Callable[[], list[str]]) -> None:
    configure_logging("info", "text")
    for log in (structlog.get_logger("a"), logging.getLogger("b")):
        try:
            raise LookupError("missing")
        except LookupError:
            log.exception("failed")
    found = lines()
    assert [line.split("Z ")[1] for line in found if "[error" in line] == [
        f"[error    ] {'failed':<30} [{name}]" for name in "ab"
    ]
    assert found.count("LookupError: missing") == 2


def test_lines_below_the_level_are_not_written(lines: Callable[[], list[str]]) -> None:
    configure_logging("warning", "text")
    for log in (structlog.get_logger("a"), logging.getLogger("b")):
        log.info("hidden")
        log.warning("shown")
    found = lines()
    assert len(found) == 2
    assert all("shown" in line for line in found)


def test_json_lines_of_both_loggers_have_the_same_fields(lines: Callable[[], list[str]]) -> None:
    configure_logging("info", "json")
    structlog.contextvars.bind_contextvars(request_id="req_1")
    structlog.get_logger("a").info("done", size=3)
    logging.getLogger("b").info("done %s", {"size": 3})
    logging.getLogger("b").info({"event": "a dictionary"})
    own, other, message = map(json.loads, lines())
    assert own.pop("size") == 3
    assert (own["event"], other["event"]) == ("done", "done {'size': 3}")
    assert message["event"] == "{'event': 'a dictionary'}"
    assert own.keys() == other.keys() == message.keys() == {"event", "level", "logger", "timestamp", "request_id"}
