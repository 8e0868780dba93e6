"""A separate PostgreSQL (with fsync, as in production) and Valkey for benchmarks that need no other process."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from millrace.local.postgres import Postgres
from millrace.local.stack import SECRETS
from millrace.local.valkey import Valkey


def start_services(running: ExitStack, directory: Path | None = None) -> None:
    """Start both with an up-to-date schema, and set up Django for them in this process.

    Args:
        running: stops them.
        directory: their data, which is kept; default: a temporary directory.
    """
    if directory is None:
        state = Path(tempfile.mkdtemp(prefix="millrace-benchmark-"))
        running.callback(shutil.rmtree, state, ignore_errors=True)
    else:
        state = directory.absolute()
        state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o711)
    postgres, valkey = Postgres(state), Valkey(state)
    for server in (postgres, valkey):
        program = server.prepare()
        process = program.start(running.enter_context((state / f"{program.name}.log").open("ab")))
        running.callback(program.stop, process)
    postgres.make_roles()
    os.environ.update(
        MILLRACE_DATA_DIR=str(state),
        MILLRACE_DATABASE_URL=postgres.owner_url,
        MILLRACE_VALKEY_URL=valkey.url,
        **dict.fromkeys(SECRETS, "b" * 50),
        MILLRACE_LOG_LEVEL="error",
        MILLRACE_ALLOWED_HOSTS="testserver",
        DJANGO_SETTINGS_MODULE="millrace.conf.settings",
    )
    import django
    from django.core.management import call_command
    from django.db import connections

    django.setup()
    call_command("migrate", verbosity=0)
    running.callback(connections.close_all)
