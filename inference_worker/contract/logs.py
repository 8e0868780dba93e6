"""Structured logs, with one format for all processes. Prompts, outputs and keys are never logged.

Each request logs a few lines, so a line must be cheap: structlog passes its fields to the standard library's handlers,
which render them once and do not look up the calling function.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

from inference_worker.contract.optional_imports import without_packages

with without_packages("rich", "greenlet"):  # for colors and greenlets: 5 MB
    import structlog
    from structlog.typing import EventDict, WrappedLogger

_PLAIN = re.compile(r"[^\s=\"'\x00-\x1f\x7f-\x9f]+")  # texts that are written without quotation marks


def configure_logging(level: str, format_: str) -> None:
    """Send the records of structlog and the standard library to standard error, as text or as JSON lines."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, _pass_fields],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    # No line contains these.
    logging._srcfile = None  # the calling function
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    render: structlog.typing.Processor = structlog.processors.JSONRenderer() if format_ == "json" else _render_text
    handler.setFormatter(_LineFormatter(render, shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class _Fields(dict[str, Any]):
    """The fields of one of structlog's lines, as the message of a record."""


class _LineFormatter(structlog.stdlib.ProcessorFormatter):
    """The formatter of structlog's records and of all others."""

    def __init__(self, render: structlog.typing.Processor, shared: list[structlog.typing.Processor]) -> None:
        remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
        super().__init__(foreign_pre_chain=shared, processors=[remove, render])
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        fields: object = record.msg
        return str(self._render(None, "", fields.copy())) if isinstance(fields, _Fields) else super().format(record)


def _pass_fields(logger: WrappedLogger, name: str, fields: EventDict) -> tuple[tuple[_Fields], dict[str, Any]]:
    """Return the arguments for a logger of the standard library."""
    return (_Fields(fields),), {}


def _render_text(logger: WrappedLogger, name: str, fields: EventDict) -> str:
    """Return the time, the level, the event and the logger, then the other fields by name, and the traceback."""
    traceback = fields.pop("exception", "")
    time, level, event, source = (fields.pop(key, "") for key in ("timestamp", "level", "event", "logger"))
    others = [f"{key}={_quote(fields[key])}" for key in sorted(fields)]
    line = " ".join([f"{time} [{level:<9}] {event!s:<30} [{source}]", *others])
    return f"{line}\n{traceback}" if traceback else line


def _quote(value: object) -> str:
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else repr(value)
