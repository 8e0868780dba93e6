"""The tables of docs/reference/clients.md, from the matrix and the locks. The site shows them.

`make test-clients` checks that every client behaves as they describe.
"""

from __future__ import annotations

import json
import re

from tests.support.clients.environments import CLIENTS as DIRECTORY
from tests.support.clients.matrix import CLIENTS, FEATURES, Client

_COLUMNS = (
    "plain",
    "stream",
    "tools",
    "parallel tools",
    "structured output",
    "reasoning",
    "embeddings",
    "errors",
    "abort",
)


def clients_table() -> str:
    """Return the table of all clients with their versions and features."""
    rows = [
        f"| {each.name} | {version(each)} | {' | '.join(_cell(each, column) for column in _COLUMNS)} |"
        for each in CLIENTS
    ]
    head = [f"| client | version | {' | '.join(_COLUMNS)} |", f"|---|---|{'---|' * len(_COLUMNS)}"]
    return "\n".join([*head, *rows])


def notes() -> str:
    """Return the notes on clients as a list."""
    return "\n".join(f"- {each.name}: {'; '.join(_notes(each))}." for each in CLIENTS if _notes(each))


def features_table() -> str:
    """Return the table of the features and their tests."""
    return "\n".join(["| feature | test |", "|---|---|", *(f"| {name} | {text} |" for name, text in FEATURES.items())])


def version(client: Client) -> str:
    """Return the version of the client's package in its lock."""
    locks = DIRECTORY / "locks"
    if client.program.endswith(".py"):
        found = re.search(
            rf"^{re.escape(client.package)}(?:\[.*\])?==([^ ;]+)",
            (locks / f"{client.environment}.txt").read_text(),
            re.MULTILINE,
        )
        assert found is not None, f"{client.package} is not in the lock {client.environment}"
        return found.group(1)
    packages = json.loads((locks / client.environment / "package-lock.json").read_text())["packages"]
    return str(packages[f"node_modules/{client.package}"]["version"])


def _cell(client: Client, column: str) -> str:
    names = {name for name in FEATURES if name.startswith("error ")} if column == "errors" else {column}
    if names & client.failing.keys():
        return "✗"
    return "✓" if names & client.features else "–"


def _notes(client: Client) -> list[str]:
    return ([client.note] if client.note else []) + [f"{name}: {reason}" for name, reason in client.failing.items()]
