"""Every program and feature of the tested clients exists."""

from __future__ import annotations

from tests.support.clients.environments import CLIENTS as DIRECTORY
from tests.support.clients.matrix import CLIENTS, FEATURES


def test_the_matrix_names_existing_programs_and_features() -> None:
    assert len({client.program for client in CLIENTS}) == len(CLIENTS)
    for client in CLIENTS:
        directory = "python" if client.program.endswith(".py") else "node"
        assert (DIRECTORY / directory / client.program).is_file()
        assert FEATURES.keys() >= {*client.missing, *client.failing}


def test_the_locks_name_no_registry() -> None:
    for lock in DIRECTORY.glob("locks/**/*"):
        if lock.suffix in (".txt", ".json"):
            text = lock.read_text()
            assert "resolved" not in text, lock
            assert "index-url" not in text, lock
