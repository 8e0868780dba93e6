"""The platform's log configuration: log lines on stderr in the same format as the worker's."""

from __future__ import annotations

import logging
from typing import Any

from inference_worker.contract.logs import configure_logging


def configure(options: dict[str, Any]) -> None:
    """Configure logging. `options` are `level` (debug, info, warning, error) and `format` (text or json).

    Django calls this with its LOGGING setting (see LOGGING_CONFIG); other processes call it themselves.
    """
    configure_logging(options["level"], options["format"])
    # Django and uvicorn have already given these handlers and formats of their own.
    for name in ("django", "django.server", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("pikepdf").setLevel(logging.WARNING)  # it logs a greeting when it is imported
