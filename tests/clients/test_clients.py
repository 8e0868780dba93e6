"""Every client against a real platform, with the features and results of tests/support/clients/matrix.py."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.support.clients.environments import CLIENTS as DIRECTORY
from tests.support.clients.environments import node_environment, node_runtime, python_environment
from tests.support.clients.matrix import CLIENTS, Client
from tests.support.stack import EMBEDDING_MODEL, Stack, eventually

PROGRAM_SECONDS = 400
CONCURRENT_PROGRAMS = 2

Run = tuple[subprocess.CompletedProcess[str], str]  # the finished program, and the ID of its key


@pytest.fixture(scope="session")
def runs(
    platform: Stack,
    client_environ: dict[str, str],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[Run]]]:
    """Run the programs of all selected clients, a few of them concurrently."""
    # Packages are installed first, so that they are not installed while another program measures its timeouts.
    selected = [item.callspec.params["client"] for item in request.session.items if hasattr(item, "callspec")]
    commands = {client.program: _command(client) for client in selected}
    with ThreadPoolExecutor(CONCURRENT_PROGRAMS) as executor:
        yield {
            client.program: executor.submit(
                _run, commands[client.program], client, platform, client_environ, tmp_path_factory.mktemp("home")
            )
            for client in selected
        }
        executor.shutdown(cancel_futures=True)


@pytest.mark.timeout(3000)  # with the installation of all clients
@pytest.mark.parametrize(
    "client",
    [pytest.param(each, id=each.program, marks=() if each.is_core else pytest.mark.extended) for each in CLIENTS],
)
def test_client(platform: Stack, runs: dict[str, Future[Run]], client: Client) -> None:
    program, key_id = runs[client.program].result()
    results = [json.loads(line) for line in program.stdout.splitlines() if line.startswith('{"feature":')]
    failed = {each["feature"]: each["failed"] for each in results if each["failed"] is not None}
    log = f"{json.dumps(failed, indent=1)}\n{program.stdout[-3000:]}\n{program.stderr[-12000:]}"
    assert {each["feature"] for each in results} == client.features, log
    assert failed.keys() == client.failing.keys(), log
    if "abort" in client.features and "abort" not in failed:
        eventually(lambda: platform.events(key=key_id, outcome="cancelled"))
    if "embeddings" in client.features and "embeddings" not in failed:
        eventually(lambda: platform.events(key=key_id, model=EMBEDDING_MODEL))
    if "reasoning" in client.features and "reasoning" not in failed:
        eventually(lambda: any(event["reasoning_tokens"] for event in platform.events(key=key_id)))


def _command(client: Client) -> list[str]:
    """Install the client if necessary, and return the command of its program."""
    if client.program.endswith(".py"):
        return [str(python_environment(client.environment)), str(DIRECTORY / "python" / client.program)]
    return [str(node_runtime() / "node"), str(node_environment(client.environment) / "programs" / client.program)]


def _run(command: list[str], client: Client, platform: Stack, environ: dict[str, str], home: Path) -> Run:
    fields = {"name": client.name, "scopes": ["inference", "models"]}
    key = httpx2.post(f"{platform.url}/api/keys", json=fields, headers=platform.headers, timeout=60).json()
    inherited = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_DIR") if name in os.environ}
    program = subprocess.run(
        command,
        env={**inherited, **environ, "MATRIX_KEY": key["secret"], "HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    return program, str(key["id"])
