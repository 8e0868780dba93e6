"""What `millrace up` runs: the settings it completes, and a program for each process."""

from __future__ import annotations

import http.client
import secrets
import sys
from collections.abc import Mapping
from http import HTTPStatus

from inference_worker.contract import env
from inference_worker.contract.exits import report_last_exit
from inference_worker.contract.settings import ModelSpec, WorkerSettings
from millrace.conf import environment
from millrace.devserver.postgres import Postgres
from millrace.devserver.program import Program
from millrace.devserver.state_file import write_private
from millrace.devserver.valkey import Valkey

SECRETS = ("MILLRACE_SECRET_KEY", "MILLRACE_PREFIX_CACHE_SECRET", "MILLRACE_KEY_PEPPERS")
OWNER = "MILLRACE_MIGRATION_DATABASE_URL"
# What a worker has no business to know: it talks to the broker alone.
NOT_FOR_WORKERS = (
    "MILLRACE_DATABASE_URL",
    OWNER,
    "MILLRACE_EMAIL_URL",
    "MILLRACE_OIDC_CLIENT_SECRET",
    *SECRETS,
)
READY_SECONDS = 600.0
STOP_GRACE_SECONDS = 10.0
HTTP_PROTOCOL = "millrace.gateway.connections.http:GatewayHttpProtocol"
WEBSOCKET_PROTOCOL = "millrace.gateway.connections.websocket:GatewayWebSocketProtocol"


class Stack:
    """The settings of one `up`, and the programs that follow from them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Read the settings.

        Raises:
            SettingsError: naming every one that is missing, wrong or unknown.
        """
        environment.refuse_unknown(environ)
        self.data_dir = environment.data_dir(environ)
        self._given = dict(environ)
        self._made: dict[str, str] = {}
        self.postgres = None if given(environ, "MILLRACE_DATABASE_URL") else Postgres(self.data_dir)
        self.valkey = None if given(environ, "MILLRACE_VALKEY_URL") else Valkey(self.data_dir)
        # Stand-ins for what is made later, so that all else can be checked now.
        stand_ins = {
            "MILLRACE_DATABASE_URL": "postgresql://later@127.0.0.1:1/later",
            "MILLRACE_VALKEY_URL": "redis://127.0.0.1:1/0",
        } | dict.fromkeys(SECRETS, "-" * 32)
        complete = {name: value for name, value in stand_ins.items() if not given(environ, name)} | self._given
        check_all(complete)
        self.settings = env.load(environment.PlatformSettings, complete)
        self.worker = env.load(WorkerSettings, complete)

    def keep_secrets(self) -> None:
        """Take the secrets nobody gave from the data directory, where they are generated once."""
        kept = environment.read_env_file(self.data_dir / "env")
        for name in SECRETS:
            if not given(self._given, name):
                self._made[name] = kept.get(name) or secrets.token_urlsafe(48)
        self._write()

    def prepare_services(self) -> list[Program]:
        """Return the embedded services' programs, made ready to run; none for a server the user named."""
        programs = []
        if self.postgres:
            programs.append(self.postgres.prepare())
            self._made["MILLRACE_DATABASE_URL"] = self.postgres.url
            self._made[OWNER] = self.postgres.owner_url
        if self.valkey:
            programs.append(self.valkey.prepare())
            self._made["MILLRACE_VALKEY_URL"] = self.valkey.url
        self._write()
        return programs

    def make_roles(self) -> None:
        """Make the roles of the embedded PostgreSQL, which is running; another server's roles are its operator's."""
        if self.postgres:
            self.postgres.make_roles()

    def _write(self) -> None:
        """Tell `manage.py` typed by hand what this stack runs with, as far as the environment does not."""
        lines = [f"{name}={value}" for name, value in sorted(self._made.items())]
        note = "# Written by `millrace up`; the environment wins over it."
        write_private(self.data_dir / "env", "\n".join([note, *lines]) + "\n")

    def environ(self) -> dict[str, str]:
        """Return the environment of the platform's processes."""
        return (
            self._given
            | self._made
            | {
                "MILLRACE_DATA_DIR": str(self.data_dir),
                "DJANGO_SETTINGS_MODULE": "millrace.conf.settings",
                "PYTHONUNBUFFERED": "1",
            }
        )

    def worker_environ(self, spec: ModelSpec) -> dict[str, str]:
        """Return the environment of the worker that serves `spec`."""
        hidden = {name for secret in NOT_FOR_WORKERS for name in (secret, f"{secret}_FILE")}
        environ = {name: value for name, value in self.environ().items() if name not in hidden}
        return environ | {"MILLRACE_WORKER_MODEL": spec.name, "MILLRACE_WORKER_NAME": f"{spec.name}-0"}

    def programs(self) -> list[Program]:
        """Return the platform's own processes, in the order in which the supervisor keeps them: it stops the last one
        first.

        So the gateway stops taking requests before the worker ends, and the settler outlives what it settles.
        """
        return [
            self._platform("settler", "django", "run_settler"),
            *(self._worker(spec) for spec in self.settings.models),
            self._platform("web", *_celery("worker", "--pool=threads", "--concurrency=4", "--hostname=web@millrace")),
            self._platform("beat", *_celery("beat", "--pidfile=")),
            self._gateway(),
        ]

    @property
    def embedded(self) -> dict[str, Postgres | Valkey | None]:
        """The embedded services by name; None for those the user has a server for."""
        return {"PostgreSQL": self.postgres, "Valkey": self.valkey}

    @property
    def worker_names(self) -> list[str]:
        return [f"worker-{spec.name}" for spec in self.settings.models]

    def command(self, module: str, *arguments: str) -> Program:
        """Return a short-lived `python -m module`."""
        return self._platform(module, module, *arguments)

    def _platform(self, name: str, module: str, *arguments: str) -> Program:
        """Return a process of the platform. Only migrations are told the tables' owner."""
        environ = self.environ()
        if arguments[:1] != ("migrate",):
            environ.pop(f"{OWNER}_FILE", None)
            environ[OWNER] = ""  # empty and not absent: the file in the data directory names it too
        return Program(name, (sys.executable, "-m", module, *arguments), environ=environ)

    def _worker(self, spec: ModelSpec) -> Program:
        environ = self.worker_environ(spec)
        settings = env.load(WorkerSettings, environ)
        journal_dir = settings.data_dir / "journal" / settings.worker_name
        return Program(
            f"worker-{spec.name}",
            (sys.executable, "-m", "inference_worker"),
            environ=environ,
            stop_seconds=self.worker.shutdown_timeout_seconds + STOP_GRACE_SECONDS,
            on_exit=lambda: report_last_exit(settings.valkey_url, journal_dir),
        )

    def _gateway(self) -> Program:
        host, port = self.settings.host, self.settings.port
        arguments = ("--host", host, "--port", str(port), "--loop", "uvloop", "--http", HTTP_PROTOCOL)
        size = str(2 * self.settings.max_request_body_bytes)
        more = ("--ws", WEBSOCKET_PROTOCOL, "--ws-max-size", size, "--no-access-log")
        return Program(
            "gateway",
            (
                *(sys.executable, "-m", "uvicorn", "millrace.conf.asgi:application", *arguments, *more),
                *("--log-level", self.settings.log_level),
                *("--timeout-graceful-shutdown", str(self.worker.shutdown_timeout_seconds)),
                *("--forwarded-allow-ips", self.settings.trusted_proxies),
            ),
            environ=self._platform("gateway", "uvicorn").environ,
            stop_seconds=self.worker.shutdown_timeout_seconds + STOP_GRACE_SECONDS,
            ready=lambda: answers(environment.local_address(host), port),
            ready_seconds=READY_SECONDS,
        )


def given(environ: Mapping[str, str], name: str) -> bool:
    return name in environ or f"{name}_FILE" in environ


def answers(host: str, port: int) -> bool:
    """Whether the gateway says that it serves."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def check_all(environ: Mapping[str, str]) -> None:
    """Read the settings of every process, and tell the faults of all together.

    Raises:
        SettingsError: naming each setting that is missing or wrong.
    """
    faults = []
    for var in env.variables(*environment.SETTINGS_CLASSES):
        try:
            env.read(var, environ)
        except (ValueError, OSError) as exc:
            faults.append(f"{var.name}: {exc}")
    if faults:
        raise env.SettingsError("wrong settings:\n  " + "\n  ".join(faults))


def _celery(*arguments: str) -> tuple[str, ...]:
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat") if arguments[0] == "worker" else ()
    return ("celery", "--app=millrace.conf.celery", *arguments, *quiet)
