"""Log lines: structlog for our own, the standard library's for everybody else's, in one format on stderr."""

from __future__ import annotations

import logging.config
from typing import Any

import structlog

_SHARED: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure(options: dict[str, Any]) -> None:
    """Set up logging. `options`: `level` (debug, info, warning, error) and `format` (text or json).

    Django calls this with its LOGGING setting (see LOGGING_CONFIG); other processes call it themselves.
    """
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"millrace": {"()": _formatter, "json": options["format"] == "json"}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "millrace"}},
            "root": {"level": options["level"].upper(), "handlers": ["stderr"]},
            "loggers": {
                "django": {"level": "NOTSET", "handlers": [], "propagate": True},
                "django.server": {"level": "NOTSET", "handlers": [], "propagate": True},
            },
        }
    )


def _formatter(json: bool) -> structlog.stdlib.ProcessorFormatter:
    render: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [structlog.dev.ConsoleRenderer(colors=False)]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render]
    )
