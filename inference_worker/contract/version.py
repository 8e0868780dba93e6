"""The installed version of Millrace."""

from __future__ import annotations

from importlib import metadata

VERSION = metadata.version("millrace-inference")
