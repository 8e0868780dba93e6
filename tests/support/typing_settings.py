"""Settings module for mypy's Django plugin: the real settings, with the required variables set."""

from __future__ import annotations

import os

os.environ.setdefault("MILLRACE_DATABASE_URL", "postgresql://types:types@127.0.0.1:1/types")
os.environ.setdefault("MILLRACE_VALKEY_URL", "redis://127.0.0.1:1/0")
os.environ.setdefault("MILLRACE_SECRET_KEY", "0" * 50)
os.environ.setdefault("MILLRACE_PREFIX_CACHE_SECRET", "0" * 50)
os.environ.setdefault("MILLRACE_KEY_PEPPERS", "0" * 50)
os.environ.setdefault("MILLRACE_WORKER_SECRET", "0" * 50)

from millrace.conf.settings import *  # noqa: F403  (after the variables it needs)
