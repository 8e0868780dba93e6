"""The state of an embedded service between starts (port, passwords, directory), in one file of the data directory."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

from millrace.environment.private_files import write_private


class ServiceState:
    """The values of one service, stored in `<data directory>/<name>.json` with mode 0600 at each change."""

    def __init__(self, data_dir: Path, name: str) -> None:
        self._path = data_dir / f"{name}.json"
        try:
            self._values: dict[str, str] = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._values = {}

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def get(self, name: str) -> str | None:
        return self._values.get(name)

    def setdefault(self, name: str, value: str) -> str:
        """Return the value of `name`. If there is none, store `value` and return it."""
        if name not in self._values:
            self._set(name, value)
        return self._values[name]

    def secret(self, name: str) -> str:
        """Return the password `name`, generated on first use. It is safe in URLs, SQL and configuration files."""
        return self.setdefault(name, secrets.token_urlsafe(32))

    def port(self, choose: Callable[[], int], is_usable: Callable[[int], bool]) -> int:
        """Return the stored port, or choose a new one if it is in use."""
        if "port" not in self._values or not is_usable(int(self._values["port"])):
            self._set("port", str(choose()))
        return int(self._values["port"])

    def _set(self, name: str, value: str) -> None:
        self._values[name] = value
        write_private(self._path, json.dumps(self._values, indent=2) + "\n")
