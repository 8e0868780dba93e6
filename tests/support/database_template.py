"""A PostgreSQL cluster with the migrated database, made once for all processes of `pytest -n`.

Each process has its own server with a copy of the cluster. With one server for all, an open transaction of one process
would delay the change feed in the databases of the others.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from millrace.local.postgres import Postgres
from millrace.local.state_file import ServiceState

VARIABLE = "MILLRACE_TEST_DATABASE_TEMPLATE"  # the directory, in the environment of the processes that run tests
_SECRETS = ("password", "app_password", "superuser_password")


class DatabaseTemplate:
    """The cluster in a directory, which `create` makes. The first process that needs the cluster fills it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def create(cls) -> DatabaseTemplate:
        directory = Path(tempfile.mkdtemp(prefix="millrace-template-"))
        if os.geteuid() == 0:
            directory.chmod(0o711)  # PostgreSQL runs as another user then and must reach its data below
        state = ServiceState(directory, "postgres")
        for name in _SECRETS:
            state.secret(name)
        os.environ[VARIABLE] = str(directory)
        return cls(directory)

    def remove(self) -> None:
        if cluster := ServiceState(self._directory, "postgres").get("directory"):
            shutil.rmtree(cluster, ignore_errors=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def share_secrets(self, data_dir: Path) -> None:
        """Give a server's data directory the passwords of the cluster, so that its URL is known before it starts."""
        own, given = (ServiceState(path, "postgres") for path in (data_dir, self._directory))
        for name in _SECRETS:
            own.setdefault(name, given[name])

    def copy_to(self, data_dir: Path) -> None:
        """Put a copy of the cluster into the data directory of a server that does not run yet."""
        with (self._directory / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self._directory / "complete").exists():
                self._make()
                (self._directory / "complete").touch()
        subprocess.run(["cp", "-a", Postgres(self._directory).directory, data_dir / "postgres"], check=True)
        state = ServiceState(data_dir, "postgres")
        state.setdefault("directory", str(data_dir / "postgres"))
        state.setdefault("initialized", "yes")

    def _make(self) -> None:
        server = Postgres(self._directory, durable=False)
        program = server.prepare()
        environ = os.environ | {"MILLRACE_DATABASE_URL": server.owner_url, "PYTHONPATH": os.pathsep.join(sys.path)}
        with (self._directory / "postgres.log").open("ab") as log:
            process = program.start(log)
            try:
                server.make_roles()
                subprocess.run([sys.executable, "-m", "django", "migrate", "--verbosity=0"], env=environ, check=True)
            finally:
                program.stop(process)
