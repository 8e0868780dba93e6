"""The processes that `millrace up` runs: their settings and programs."""

from __future__ import annotations

import http.client
import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from inference_worker.contract import env
from inference_worker.contract.exits import report_last_exit
from inference_worker.contract.settings import HUB_PREFIX, ModelSpec, WorkerSettings, format_models
from inference_worker.contract.worker_names import default_name
from millrace.environment import configuration
from millrace.environment.private_files import write_private
from millrace.local.bundled_models import ModelChoice, choose_models, read_machine_size
from millrace.local.postgres import Postgres
from millrace.local.preparation import Preparation
from millrace.local.program import Program, ServiceError
from millrace.local.valkey import Valkey

PLATFORM_SECRETS = (
    "MILLRACE_SECRET_KEY",
    "MILLRACE_PREFIX_CACHE_SECRET",
    "MILLRACE_KEY_PEPPERS",
    "MILLRACE_CREDENTIAL_KEYS",
)
SECRETS = (*PLATFORM_SECRETS, "MILLRACE_WORKER_SECRET")
MODELS = "MILLRACE_MODELS"
ON_DEMAND = "MILLRACE_WORKER_ON_DEMAND_MODELS"
OWNER = "MILLRACE_MIGRATION_DATABASE_URL"
# Variables that workers do not receive: a worker uses only Valkey.
NOT_FOR_WORKERS = (
    "MILLRACE_DATABASE_URL",
    OWNER,
    "MILLRACE_EMAIL_URL",
    "MILLRACE_OIDC_CLIENT_SECRET",
    *PLATFORM_SECRETS,
)
# Variables with a token of the hub, which only the process that pulls models receives.
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
READY_SECONDS = 600.0
STOP_GRACE_SECONDS = 10.0
HTTP_PROTOCOL = "millrace.gateway.connections.http:GatewayHttpProtocol"
WEBSOCKET_PROTOCOL = "millrace.gateway.connections.websocket:GatewayWebSocketProtocol"


class Stack:
    """The settings of one `millrace up`, and the programs that they define."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Read the settings.

        Raises:
            SettingsError: names every setting that is missing, invalid or unknown.
        """
        configuration.reject_unknown(environ)
        self.data_dir = configuration.data_dir(environ)
        self._environ = dict(environ)
        self._generated: dict[str, str] = {}
        self.postgres = None if is_set(environ, "MILLRACE_DATABASE_URL") else Postgres(self.data_dir)
        self.valkey = None if is_set(environ, "MILLRACE_VALKEY_URL") else Valkey(self.data_dir)
        # Placeholders for values that are generated later, so that the other settings can be checked now.
        placeholders = {
            "MILLRACE_DATABASE_URL": "postgresql://later@127.0.0.1:1/later",
            "MILLRACE_VALKEY_URL": "redis://127.0.0.1:1/0",
        } | dict.fromkeys(SECRETS, "-" * 32)
        complete = {name: value for name, value in placeholders.items() if not is_set(environ, name)} | self._environ
        env.read_all(complete, *configuration.SETTINGS_CLASSES)
        self.settings = env.load(configuration.PlatformSettings, complete)
        self.worker = env.load(WorkerSettings, complete)
        self.model_choice = ModelChoice(self.settings.models)
        self.on_demand = self.worker.worker_on_demand_models  # served by the worker of the first model
        if not is_set(environ, MODELS):
            self.model_choice = choose_models(self.settings.models, read_machine_size())
            if not is_set(environ, ON_DEMAND):
                self.on_demand = tuple(spec.name for spec in self.model_choice.models[1:])
        if self.model_choice.reason:
            self.settings = replace(self.settings, models=self.model_choice.models)
            self._generated[MODELS] = format_models(self.settings.models)

    def store_secrets(self) -> None:
        """Read the secrets that the environment does not set from the data directory, or generate them."""
        stored = configuration.read_env_file(self.data_dir / "env")
        for name in SECRETS:
            if not is_set(self._environ, name):
                self._generated[name] = stored.get(name) or secrets.token_urlsafe(48)
        self._write()

    def prepare_services(self) -> list[Program]:
        """Prepare the embedded services and return their programs."""
        programs = []
        if self.postgres:
            programs.append(self.postgres.prepare())
            self._generated["MILLRACE_DATABASE_URL"] = self.postgres.url
            self._generated[OWNER] = self.postgres.owner_url
        if self.valkey:
            programs.append(self.valkey.prepare())
            self._generated["MILLRACE_VALKEY_URL"] = self.valkey.url
        self._write()
        return programs

    def use_sources(self, sources: Mapping[str, str]) -> None:
        """Replace the sources of models, by their names, for all programs that are created later.

        Raises:
            ServiceError: a path cannot be written to MILLRACE_MODELS.
        """
        if not sources:
            return
        models = tuple(replace(spec, source=sources.get(spec.name, spec.source)) for spec in self.settings.models)
        try:
            self._generated[MODELS] = format_models(models)
        except ValueError as exc:
            raise ServiceError(str(exc)) from None
        self._environ.pop(f"{MODELS}_FILE", None)
        self.settings = replace(self.settings, models=models)
        self._write()

    def make_roles(self) -> None:
        """Create the roles of the embedded PostgreSQL, which must be running. Other servers are not changed."""
        if self.postgres:
            self.postgres.make_roles()

    def preparation(self, credentials: Path) -> Preparation:
        """Return the preparation of the database for these settings. The services must be running."""
        return Preparation(env.load(configuration.PlatformSettings, self.environ()), credentials)

    def _write(self) -> None:
        """Write the generated settings to the data directory, for `millrace manage` in a shell."""
        lines = [f"{name}={value}" for name, value in sorted(self._generated.items())]
        header = "# Written at each start of the platform. The environment overrides these values."
        write_private(self.data_dir / "env", "\n".join([header, *lines]) + "\n")

    def environ(self) -> dict[str, str]:
        """Return the environment of the platform's processes."""
        return (
            {name: value for name, value in self._environ.items() if name not in HUB_TOKENS}
            | self._generated
            | {
                "MILLRACE_DATA_DIR": str(self.data_dir),
                "DJANGO_SETTINGS_MODULE": "millrace.conf.settings",
                "PYTHONUNBUFFERED": "1",
            }
        )

    def worker_environ(self, spec: ModelSpec) -> dict[str, str]:
        """Return the environment of the worker that serves the model."""
        hidden = {name for secret in NOT_FOR_WORKERS for name in (secret, f"{secret}_FILE")}
        environ = {name: value for name, value in self.environ().items() if name not in {*hidden, f"{ON_DEMAND}_FILE"}}
        return environ | {
            "MILLRACE_WORKER_MODEL": spec.name,
            "MILLRACE_WORKER_NAME": default_name(spec.name, self.data_dir),
            ON_DEMAND: ",".join(self.on_demand) if spec.name == self.default_model else "",
        }

    def programs(self) -> list[Program]:
        """Return the platform's programs in the order of their start. They are stopped in the reverse order.

        Therefore the gateway stops accepting requests before the workers end, and the settler ends last.
        """
        return [
            self._platform("settler", "django", "run_settler"),
            *(
                self._worker(spec)
                for spec in self.settings.models
                if spec.name == self.default_model or spec.name not in self.on_demand
            ),
            self._platform("web", "millrace.conf.web_jobs"),
            self._gateway(),
        ]

    @property
    def embedded(self) -> dict[str, Postgres | Valkey | None]:
        """Return the embedded services by name; None for those that the user provides."""
        return {"PostgreSQL": self.postgres, "Valkey": self.valkey}

    def kernel_build(self) -> Program:
        """Return the program that builds the C kernels of this machine once."""
        hidden = ("MILLRACE_", *HUB_TOKENS)
        environ = {name: value for name, value in self._environ.items() if not name.startswith(hidden)}
        return Program("kernels", (sys.executable, "-m", "kernels.native.build"), environ=environ)

    @property
    def needs_sources(self) -> bool:
        """Return whether a model is on the hub and must have been pulled before its worker starts."""
        return any(spec.source.startswith(HUB_PREFIX) for spec in self.settings.models)

    @property
    def default_model(self) -> str:
        return self.settings.models[0].name

    def command(self, module: str, *arguments: str, tokens: bool = False) -> Program:
        """Return the program of a short-lived `python -m module`, with the hub's tokens if it needs them."""
        program = self._platform(module, module, *arguments)
        given = {name: self._environ[name] for name in HUB_TOKENS if name in self._environ}
        return replace(program, environ={**program.environ, **given}) if tokens else program

    def _platform(self, name: str, module: str, *arguments: str) -> Program:
        """Return a process of the platform. Only the preparation receives the URL with the owner of the tables."""
        environ = self.environ()
        if arguments[:1] != ("prepare",):
            environ.pop(f"{OWNER}_FILE", None)
            environ[OWNER] = ""  # empty instead of absent, since the file in the data directory also sets it
        return Program(
            name,
            (sys.executable, "-m", module, *arguments),
            environ=environ,
            reports_ready=True,
            ready_seconds=READY_SECONDS,
        )

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
            reports_ready=True,
            ready_seconds=READY_SECONDS,
        )

    def _gateway(self) -> Program:
        host, port = self.settings.host, self.settings.port
        address = configuration.local_address(host), port
        arguments = ("--host", host, "--port", str(port), "--loop", "uvloop", "--http", HTTP_PROTOCOL)
        size = str(2 * self.settings.max_request_body_bytes)
        websocket_arguments = ("--ws", WEBSOCKET_PROTOCOL, "--ws-max-size", size, "--no-access-log")
        return Program(
            "gateway",
            (
                *(sys.executable, "-m", "uvicorn", "millrace.conf.asgi:application", *arguments, *websocket_arguments),
                *("--log-level", self.settings.log_level),
                *("--timeout-graceful-shutdown", str(self.worker.shutdown_timeout_seconds)),
                *("--forwarded-allow-ips", self.settings.trusted_proxies),
            ),
            # If its loop is blocked, SIGABRT writes all stacks to the log from C code.
            environ={**self._platform("gateway", "uvicorn").environ, "PYTHONFAULTHANDLER": "1"},
            stop_seconds=self.worker.shutdown_timeout_seconds + STOP_GRACE_SECONDS,
            ready=lambda: is_serving(*address, self.default_model),
            ready_seconds=READY_SECONDS,
            http_address=address,
        )


def is_set(environ: Mapping[str, str], name: str) -> bool:
    return name in environ or f"{name}_FILE" in environ


def is_serving(host: str, port: int, model: str) -> bool:
    """Return whether the gateway reports that it can serve requests for the model. Other models may still load."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/readyz?models=all")
        checks = json.loads(connection.getresponse().read())["checks"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False
    finally:
        connection.close()
    return all(state == "ok" for name, state in checks.items() if name == f"model {model}" or " " not in name)
