"""PostgreSQL and Valkey for one pytest process. Their URLs are known before they start."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from millrace.local.postgres import Postgres
from millrace.local.program import Program
from millrace.local.state_file import ServiceState
from millrace.local.valkey import Valkey
from tests.support.database_template import DatabaseTemplate
from tests.support.models import share_models


class Services:
    """Embedded servers with their data in a temporary directory. A given URL replaces a server.

    PostgreSQL starts with a copy of the template, if there is one.
    """

    def __init__(
        self, database_url: str | None, broker_url: str | None, template: DatabaseTemplate | None = None
    ) -> None:
        self._running = ExitStack()
        self._started = False
        self.data_dir = Path(tempfile.mkdtemp(prefix="millrace-tests-"))
        self._running.callback(shutil.rmtree, self.data_dir, ignore_errors=True)
        if os.geteuid() == 0:
            self.data_dir.chmod(0o711)  # PostgreSQL runs as another user then and must reach its data below
        share_models(self.data_dir)  # for the gateways and workers that tests start
        self.unused_port = self._reserve_port(self._running)
        self._reserved = self._running.enter_context(ExitStack())  # ports of servers that do not run yet
        self._postgres = None if database_url else Postgres(self.data_dir, durable=False)
        self._template = template if self._postgres else None
        if self._template:
            self._template.share_secrets(self.data_dir)
        self._valkey = None if broker_url else Valkey(self.data_dir, durable=False)
        self.database_url = database_url or self._postgres_url()
        self.broker_url = broker_url or self._valkey_url()

    @property
    def superuser_url(self) -> str:
        """The embedded PostgreSQL's URL for its superuser."""
        assert self._postgres is not None
        return self._postgres.superuser_url

    def start(self) -> None:
        """Start the servers if they do not run."""
        if self._started:
            return
        self._started = True
        self._reserved.close()
        if self._postgres:
            if self._template:
                self._template.copy_to(self.data_dir)
            program = self._postgres.prepare()
            self._running.callback(shutil.rmtree, self._postgres.directory, ignore_errors=True)
            self._start(program)
            self._postgres.make_roles()
            assert self._postgres.owner_url == self.database_url, "another process took PostgreSQL's port: start again"
        if self._valkey:
            self._start(self._valkey.prepare())
            assert self._valkey.url == self.broker_url, "another process took Valkey's port: start again"

    def close(self) -> None:
        self._running.close()

    def _postgres_url(self) -> str:
        assert self._postgres is not None
        ServiceState(self.data_dir, "postgres").port(lambda: self._reserve_port(self._reserved), lambda _: True)
        return self._postgres.owner_url

    def _valkey_url(self) -> str:
        assert self._valkey is not None
        state = ServiceState(self.data_dir, "valkey")
        state.port(lambda: self._reserve_port(self._reserved), lambda _: True)
        state.secret("password")
        return self._valkey.url

    @staticmethod
    def _reserve_port(stack: ExitStack) -> int:
        """Return a port on which no process listens until the stack is closed."""
        reserved = stack.enter_context(socket.socket())
        reserved.bind(("127.0.0.1", 0))  # without listening
        return int(reserved.getsockname()[1])

    def _start(self, program: Program) -> subprocess.Popen[bytes]:
        log = self._running.enter_context((self.data_dir / f"{program.name}.log").open("ab"))
        process = program.start(log)
        self._running.callback(program.stop, process)
        return process
