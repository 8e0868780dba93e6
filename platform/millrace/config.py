"""The platform's settings, and the file in the state folder that fills what the environment leaves out.

`millrace up` writes `<state folder>/env` with the URLs of the embedded services and the secrets it generated, so that
`manage.py …` typed by hand finds the running stack. The environment always wins over that file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from inference_worker import env
from inference_worker.settings import SharedSettings, WorkerSettings


def database(url: str) -> str:
    """Check a PostgreSQL URL: it must name a host and a database."""
    env.url("postgres", "postgresql")(url)
    parts = urlsplit(url)
    if not parts.hostname or len(parts.path) < 2:
        raise ValueError("want postgresql://user:password@host:port/name")
    _ = parts.port  # raises ValueError when it is no port number
    return url


def secret(text: str) -> str:
    """Check a secret: long enough that guessing is out of the question."""
    if len(text) < 32:
        raise ValueError("want at least 32 characters")
    return text


def web_url(text: str) -> str:
    """Check an address for the outside: empty, or http(s)://host without a trailing slash."""
    return env.url("http", "https")(text).rstrip("/") if text else ""


@dataclass(frozen=True)
class PlatformSettings(SharedSettings):
    """What the gateway, the console, the settler and the web jobs read."""

    database_url: str = env.env(
        "MILLRACE_DATABASE_URL",
        database,
        default=None,
        help="PostgreSQL, postgresql://user:password@host:port/name; `millrace up` starts an embedded one if it is not set",
        secret=True,
    )
    secret_key: str = env.env(
        "MILLRACE_SECRET_KEY",
        secret,
        default=None,
        help="signs sessions and tokens; at least 32 characters; `millrace up` generates and keeps one if it is not set",
        secret=True,
    )
    cache_secret: str = env.env(
        "MILLRACE_CACHE_SECRET",
        secret,
        default=None,
        help="roots the salts that keep tenants' prompt caches apart; at least 32 characters; generated as above",
        secret=True,
    )
    host: str = env.env("MILLRACE_HOST", str, default="127.0.0.1", help="address the gateway listens on")
    port: int = env.env("MILLRACE_PORT", env.integer(1, 65_535), default="8000", help="port the gateway listens on")
    allowed_hosts: tuple[str, ...] = env.env(
        "MILLRACE_ALLOWED_HOSTS",
        env.words,
        default="localhost,127.0.0.1,[::1]",
        help="host names the console answers to, comma-separated",
    )
    debug: bool = env.env(
        "MILLRACE_DEBUG", env.boolean, default="false", help="Django's debug pages; never in production"
    )
    public_url: str = env.env(
        "MILLRACE_PUBLIC_URL",
        web_url,
        default="",
        help="address customers use; https:// turns on secure cookies and HSTS and expects a proxy that sets"
        " X-Forwarded-Proto; empty: http://host:port",
    )
    max_body_bytes: int = env.env("MILLRACE_MAX_BODY", env.size, default="8MiB", help="largest request body")
    queue_seconds: int = env.env(
        "MILLRACE_QUEUE_SECONDS",
        env.integer(1, 3600),
        default="30",
        help="how long a request may wait for a worker, in seconds",
    )

    @property
    def base_url(self) -> str:
        """Where customers reach the gateway, without a trailing slash."""
        if self.public_url:
            return self.public_url
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


SETTINGS_CLASSES: tuple[type[Any], ...] = (PlatformSettings, WorkerSettings)


def refuse_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Fail on MILLRACE_ variables that nothing reads.

    Raises:
        SettingsError: naming each, with the known name it most likely stands for.
    """
    unknown = env.unknown_names(os.environ if environ is None else environ, *SETTINGS_CLASSES)
    if not unknown:
        return
    known = [var.name for var in env.variables(*SETTINGS_CLASSES)]
    lines = []
    for name in unknown:
        near = difflib.get_close_matches(name.removesuffix("_FILE"), known, n=1, cutoff=0.7)
        lines.append(f"{name}: no such setting" + (f"; did you mean {near[0]}?" if near else ""))
    raise env.SettingsError("unknown settings:\n  " + "\n  ".join(lines))


def state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The state folder, as an absolute path; it need not exist."""
    var = next(var for var in env.variables(SharedSettings) if var.name == "MILLRACE_STATE_DIR")
    value: Path = env.read(var, os.environ if environ is None else environ)
    return value


def read_env_file(path: Path) -> dict[str, str]:
    """Read KEY=value lines; empty lines and lines that start with # are skipped. A missing file is empty."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    pairs = (line.partition("=") for line in lines if line.strip() and not line.startswith("#"))
    return {name.strip(): value for name, _, value in pairs}


def effective_environ(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment, with what it leaves out taken from `<state folder>/env`."""
    environ = os.environ if environ is None else environ
    kept = read_env_file(state_dir(environ) / "env")
    return {name: value for name, value in kept.items() if f"{name}_FILE" not in environ} | dict(environ)


@cache
def platform_settings() -> PlatformSettings:
    """This process' settings, read once."""
    return env.load(PlatformSettings, effective_environ())


def database_parameters(url: str) -> dict[str, Any]:
    """Django's NAME, USER, PASSWORD, HOST, PORT and OPTIONS for a URL; its query becomes libpq parameters (sslmode, …)."""
    parts = urlsplit(url)
    return {
        "NAME": unquote(parts.path[1:]),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),
        "PORT": str(parts.port or ""),
        "OPTIONS": dict(parse_qsl(parts.query)),
    }
