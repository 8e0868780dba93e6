"""The output and the exit status of commands, compared with a recording.

The recording has command lines of a tenant, an operator, an API key without rights and of no user, which run in this
order. A line `! …` is of standard error. JSON is on one line. A word such as `{api-key}` is the ID of an object of
`furnished_acme`.

After a change that is intended, UPDATE_COMMANDS=1 records the commands again. Review the difference in git.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from django.db import connection

from inference_worker.contract.command_line import format_command
from millrace import cli
from millrace.cli import app, profiles
from tenants import actions
from tests.support.billing.books import rate_card
from tests.support.tenants.management_api import only_default

pytestmark = pytest.mark.django_db
RECORDING = Path(__file__).parents[2] / "data" / "cli" / "commands.txt"
URL = "http://testserver"
FIRST_ID, FIRST_ID_OF_SEEDS = 80_001, 70_001
_SEQUENCES = "SELECT format('%I.%I', schemaname, sequencename) FROM pg_sequences WHERE schemaname = 'public'"
_COMMAND = re.compile(r"(tenant|operator|limited|anonymous)\$ millrace (.*)")
_VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?"), "<time>"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d"), "<minute>       "),
    (re.compile(r"\b20\d\d-\d\d-\d\d\b"), "<day>     "),
    (re.compile(r"\b20\d\d-\d\d\b"), "<month>"),
    (re.compile(r"\b20\d\d-(?=\d{6})"), "<yr>-"),
    (re.compile(r"sk-mr-[\w-]{20,}"), "<key>"),
    (re.compile(r"sk-mr-[\w-]+"), "<prefix>"),
    (re.compile(r"whsec_[\w+/=-]+"), "<signing secret>"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "<uuid>"),
    (re.compile(r"\bevt_[0-9a-f]{32}\b"), "<event>"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "<digest>"),
)


@pytest.fixture
def restart_ids(db: None, as_owner: Any) -> Callable[[int], None]:
    """Return a function that lets the IDs of all tables start at a number, for this transaction."""

    def restart_ids(first: int) -> None:
        with as_owner(), connection.cursor() as cursor:
            cursor.execute(_SEQUENCES)
            for (sequence,) in cursor.fetchall():
                cursor.execute(f"ALTER SEQUENCE {sequence} RESTART WITH {first}")

    return restart_ids


@pytest.fixture
def _seed_ids(restart_ids: Callable[[int], None]) -> None:
    restart_ids(FIRST_ID_OF_SEEDS)


@pytest.fixture
def _no_log() -> Iterator[None]:
    """Keep the server's log out of the output of commands."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def connections(
    _seed_ids: None,
    furnished_acme: Any,
    key_connection: Any,
    operator_connection: Any,
    restart_ids: Callable[[int], None],
) -> dict[str, profiles.Connection]:
    """The connections of the actors."""
    _, secret = actions.do_create_api_key(only_default(furnished_acme.tenant), "limited", scopes=["inference"])
    for model in ("smollm2-135m", "smollm2-135m-int8"):
        rate_card(model)
    restart_ids(FIRST_ID)
    limited = profiles.Connection(URL, secret)
    return {"tenant": key_connection, "operator": operator_connection, "limited": limited}


def _recorded_lines() -> Iterator[tuple[str, str]]:
    """Yield the actors and command lines of the recording."""
    for line in RECORDING.read_text(encoding="utf-8").splitlines():
        if found := _COMMAND.fullmatch(line):
            yield found[1], found[2]


def _without_varying(text: str) -> str:
    for pattern, name in _VARYING:
        text = pattern.sub(name, text)
    return text.replace(format_command(), "millrace")


def _lines_of(text: str, prefix: str = "") -> list[str]:
    """Return the lines of an output. JSON, which must have the usual indentation, becomes one line."""
    if text.startswith(("{", "[")):
        value = json.loads(text)
        assert text == f"{json.dumps(value, indent=2, ensure_ascii=False)}\n"
        text = f"{json.dumps(value, ensure_ascii=False)}\n"
    return [f"{prefix}{line}".rstrip() for line in _without_varying(text).splitlines()]


@pytest.mark.usefixtures("_no_log", "broker")
def test_commands_are_as_recorded(connections, furnished_acme, connect, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("UPSTREAM_SECRET", "sk-upstream")
    for name in ("MILLRACE_URL", "MILLRACE_API_KEY", "MILLRACE_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("policy.json").write_text('{"rules": [{"targets": [{"model": "smollm2-135m"}]}]}', encoding="utf-8")
    prices = "model,tier,component,usd_per_million\nnew-model,standard,output,3.75\n"
    Path("prices.csv").write_text(prices, encoding="utf-8")
    find_connection = app.find_connection
    monkeypatch.setattr(app, "make_client", connect)
    lines: list[str] = []
    for actor, line in _recorded_lines():
        given = connections.get(actor)
        monkeypatch.setattr(app, "find_connection", find_connection if given is None else lambda *_, _c=given: _c)
        words = shlex.split(re.sub(r"\{([a-z-]+)\}", lambda found: str(furnished_acme.ids[found[1]]), line))
        result = CliRunner().invoke(cli.root, words, prog_name="millrace")
        assert result.exception is None or isinstance(result.exception, SystemExit), (line, result.exception)
        lines += [f"{actor}$ millrace {line}", *_lines_of(result.stdout), *_lines_of(result.stderr, "! ")]
        lines += [f"exit {result.exit_code}", ""]
    if os.environ.get("UPDATE_COMMANDS"):
        RECORDING.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    recorded = RECORDING.read_text(encoding="utf-8").splitlines()
    difference = "\n".join(difflib.unified_diff(recorded, lines[:-1], "recorded", "printed", lineterm=""))
    assert not difference, difference
