"""The stored connections of the command line: URL and credentials by profile, in a private file."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inference_worker.contract.command_line import format_command

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_PROFILE = "default"
URL, API_KEY, PROFILE = "MILLRACE_URL", "MILLRACE_API_KEY", "MILLRACE_PROFILE"


class NotSignedIn(Exception):
    """Raised if there are no credentials. The message says what to do."""


@dataclass(frozen=True)
class Connection:
    """A platform and credentials: an API key, or the cookies of an operator's session."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    cookies: Mapping[str, str] | None = field(default=None, repr=False)
    who: str = ""  # the tenant of the key, or the operator's email address


@dataclass
class ProfileFile:
    """The content of the file: the current profile's name, and all profiles."""

    current: str = DEFAULT_PROFILE
    profiles: dict[str, Connection] = field(default_factory=dict)
    device: str = ""  # ID of this machine, if a command needed one


def config_path() -> Path:
    given = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(given) if given else Path.home() / ".config"
    return base / "millrace" / "config.json"


def read_profiles(path: Path) -> ProfileFile:
    """Return the stored profiles.

    Raises:
        NotSignedIn: the file is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ProfileFile()
    try:
        stored: dict[str, Any] = json.loads(text)
        profiles = {name: Connection(**fields) for name, fields in stored["profiles"].items()}
        return ProfileFile(str(stored["current"]), profiles, str(stored.get("device", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise NotSignedIn(f"{path} is damaged: delete it and run `{format_command('login')}`.") from None


@contextmanager
def changed_profiles(path: Path) -> Iterator[ProfileFile]:
    """Change the stored profiles: read them under a lock, and replace the file if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.with_name(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stored = read_profiles(path)
        yield stored
        profiles = {name: asdict(connection) for name, connection in stored.profiles.items()}
        content = {"current": stored.current, "profiles": profiles, "device": stored.device}
        text = json.dumps(content, indent=2) + "\n"
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".config-")  # with mode 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def read_device_id(path: Path) -> str:
    """Return a random ID of this machine, which is stored at its first use."""
    if device := read_profiles(path).device:
        return device
    with changed_profiles(path) as stored:
        stored.device = stored.device or secrets.token_hex(8)
        return stored.device


def profile_name(profile: str | None, environ: Mapping[str, str], stored: ProfileFile) -> str:
    """Return the profile to use: the option's, else the environment's, else the current one."""
    return profile or environ.get(PROFILE) or stored.current


def find_connection(profile: str | None, environ: Mapping[str, str], path: Path) -> Connection:
    """Return the connection to use.

    A key of the environment is used unless a profile is named by option. It is sent to the environment's URL, else to
    the profile's. A stored key is sent only to the URL that it was stored with.

    Raises:
        NotSignedIn: there is none.
    """
    url, api_key = environ.get(URL), environ.get(API_KEY, "").strip()
    if api_key and url and not profile:
        return Connection(url, api_key)
    stored = read_profiles(path)
    name = profile_name(profile, environ, stored)
    connection = stored.profiles.get(name)
    if api_key and not profile and (connection or not environ.get(PROFILE)):
        return Connection(connection.url if connection else DEFAULT_URL, api_key)
    if connection is None:
        option = "" if name == DEFAULT_PROFILE else f" --profile {name}"
        login = format_command(f"login{option}")
        raise NotSignedIn(f"Not signed in. Run `{login}`, or set {URL} and {API_KEY}.")
    if url and url.rstrip("/") != connection.url and not profile:
        raise NotSignedIn(
            f"{URL} is not the server of the profile {name!r} ({connection.url}): set {API_KEY} too, or unset {URL}."
        )
    return connection
