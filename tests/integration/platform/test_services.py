"""The embedded PostgreSQL and Valkey as real processes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from inference_worker.contract.valkey import STARTUP_CHECK, connect
from millrace.local import data_dir as directories
from millrace.local.postgres import Postgres
from millrace.local.program import Program, ServiceError, UnixUser
from millrace.local.state_file import ServiceState
from millrace.local.valkey import Valkey
from tenants.isolation import db_roles

NOBODY = UnixUser(65534, 65534)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="what only root does, only root can test")


@contextmanager
def running(program: Program, state: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (state / f"{program.name}.log").open("ab") as log:
        process = program.start(log)
        try:
            yield process
        finally:
            if process.poll() is None:
                program.stop(process)


def ask(url: str, query: str) -> Any:
    with psycopg.connect(url) as connection:
        row = connection.execute(query.encode()).fetchone()
        return row[0] if row and len(row) == 1 else row


def keep_seven(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")


def test_the_platforms_role_owns_its_database_and_is_not_a_superuser(data_dir: Path) -> None:
    server = Postgres(data_dir, durable=False)
    with running(server.prepare(), data_dir):
        traits = "SELECT rolsuper, rolbypassrls, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = current_user"
        assert ask(server.owner_url, traits) == (False, False, False, True)
        assert (
            ask(server.owner_url, "SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = 'millrace'")
            == "millrace"
        )
        assert ask(server.owner_url, "SELECT datlocale FROM pg_database WHERE datname = 'millrace'") == "C.UTF-8"
        assert ask(server.superuser_url, "SELECT usesuper FROM pg_user WHERE usename = current_user") is True
        assert ask(server.owner_url, "SHOW listen_addresses") == "127.0.0.1"
        assert ask(server.superuser_url, "SHOW unix_socket_directories") == ""
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            ask(server.owner_url.replace(":" + ServiceState(data_dir, "postgres")["password"], ":wrong"), "SELECT 1")


def test_roles_are_created_once_with_their_restrictions(data_dir: Path) -> None:
    server = Postgres(data_dir, durable=False)
    with running(server.prepare(), data_dir):
        for _ in range(2):
            server.make_roles()
        traits = "SELECT rolsuper, rolbypassrls, rolcreaterole, rolcreatedb, rolcanlogin FROM pg_roles WHERE rolname = "
        assert ask(server.url, f"{traits} current_user") == (False, False, False, False, True)
        assert ask(server.url, f"{traits} 'millrace_system'") == (False, True, False, False, False)
        assert ask(db_roles.as_role(server.url, db_roles.SYSTEM), "SELECT current_user::text") == db_roles.SYSTEM
        assert ask(db_roles.as_role(server.owner_url, db_roles.APP), "SELECT current_user::text") == db_roles.APP
        with pytest.raises(psycopg.Error, match="permission denied"):
            ask(server.url, "CREATE TABLE theirs (n integer)")
        with pytest.raises(psycopg.Error, match="permission denied"):
            ask(db_roles.as_role(server.url, "millrace"), "SELECT 1")


def test_a_warm_start_keeps_data_port_and_passwords(data_dir: Path) -> None:
    server = Postgres(data_dir)
    with running(server.prepare(), data_dir):
        url = server.owner_url
        keep_seven(url)
    with running(server.prepare(), data_dir) as process:
        assert server.owner_url == url
        assert ask(url, "SELECT n FROM kept") == 7
    assert process.returncode == 0


def test_postgres_starts_after_all_processes_were_killed(data_dir: Path) -> None:
    server = Postgres(data_dir)
    with running(server.prepare(), data_dir) as process:
        keep_seven(server.owner_url)
        process.kill()
        process.wait()
    lock = next(server.directory.glob("data/postmaster.pid"))
    # As after a restart of the machine: the process ID now belongs to an unrelated process.
    lines = lock.read_text().splitlines()
    lock.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    with running(server.prepare(), data_dir):
        assert ask(server.owner_url, "SELECT n FROM kept") == 7


def test_a_server_left_running_is_ended_before_the_next_starts(data_dir: Path) -> None:
    server = Postgres(data_dir)
    with running(server.prepare(), data_dir) as old:
        assert ask(server.owner_url, "SELECT 1") == 1
        with running(server.prepare(), data_dir):
            assert old.wait(60) == 0
            assert ask(server.owner_url, "SELECT 1") == 1


@pytest.mark.parametrize("kind", [Postgres, Valkey])
def test_a_port_in_use_is_replaced(data_dir: Path, kind: type[Postgres] | type[Valkey]) -> None:
    server = kind(data_dir)
    server.prepare()
    kept = ServiceState(data_dir, "postgres" if kind is Postgres else "valkey")
    with socket.create_server(("127.0.0.1", int(kept["port"]))), running(server.prepare(), data_dir) as process:
        assert f":{kept['port']}/" not in server.url
        assert process.poll() is None


def test_lost_data_is_not_treated_as_a_first_start(data_dir: Path) -> None:
    server = Postgres(data_dir, durable=False)
    server.prepare()
    shutil.rmtree(server.directory)
    with pytest.raises(ServiceError, match="data is missing"):
        server.prepare()


def test_an_interrupted_first_start_is_completed(data_dir: Path) -> None:
    server = Postgres(data_dir, durable=False)
    server.prepare()
    folder = server.directory
    (folder / "data").rename(folder / "data.new")  # as if killed before the last step
    (folder / "data.new" / "PG_VERSION").unlink()
    values = ServiceState(data_dir, "postgres")._path
    values.write_text(values.read_text().replace('"initialized": "yes"', '"initialized": ""'))
    with running(server.prepare(), data_dir):
        assert ask(server.owner_url, "SELECT 1") == 1


def test_the_error_for_a_user_without_a_name_says_what_to_do(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert directories.has_name(0)
    assert not directories.has_name(54321)
    monkeypatch.setattr(directories, "has_name", lambda uid: False)
    with pytest.raises(ServiceError, match=r"requires a name for user ID .* set MILLRACE_DATABASE_URL"):
        Postgres(data_dir).prepare()


@as_root
def test_root_stores_data_where_the_servers_user_can_reach_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    before = {path: path.stat().st_mode for path in (tmp_path, *tmp_path.parents)}
    server = Postgres(tmp_path, durable=False)
    program = server.prepare()
    folder = server.directory
    try:
        assert tmp_path not in folder.parents
        assert program.user
        assert folder.stat().st_uid == program.user.uid != 0
        assert folder.stat().st_mode & 0o777 == 0o700
        with running(program, tmp_path) as process:
            assert ask(server.owner_url, "SELECT 1") == 1
            assert Path(f"/proc/{process.pid}").stat().st_uid == program.user.uid
    finally:
        shutil.rmtree(folder)
    assert {path: path.stat().st_mode for path in before} == before


@as_root
def test_root_runs_a_copy_of_a_program_out_of_the_users_reach(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(directories, "_OUTSIDE", (data_dir / "outside",))
    monkeypatch.setattr(directories, "reachable", lambda path, user: "site-packages" not in str(path))
    server = Postgres(data_dir, durable=False)
    program = server.prepare()
    assert program.argv[0].startswith(str(data_dir / "outside"))
    with running(program, data_dir):
        assert ask(server.owner_url, "SELECT 1") == 1


def test_reachability_depends_on_the_modes_of_directories(tmp_path: Path) -> None:
    stranger = UnixUser(54321, 54321)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    root = Path(tempfile.mkdtemp())
    try:
        target = root / "x" / "y"
        target.mkdir(parents=True)
        for mode, reached in ((0o700, False), (0o711, True), (0o755, True), (0o744, False)):
            root.chmod(mode)
            assert directories.reachable(target, stranger) is reached
        assert directories.reachable(target, None)
    finally:
        shutil.rmtree(root)


def test_a_directory_of_another_user_is_rejected(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ServiceError, match="belongs to another user"):
        directories.make_owned(tmp_path / "link", None)


def test_valkey_persists_data_and_requires_its_password(data_dir: Path) -> None:
    server = Valkey(data_dir)
    with running(server.prepare(), data_dir):
        client = redis.Redis.from_url(server.url)
        client.set("kept", "7")
        settings = client.config_get("append*") | client.config_get("maxmemory-policy") | client.config_get("bind")
        assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "everysec")
        assert (settings["maxmemory-policy"], settings["bind"]) == ("noeviction", "127.0.0.1")
        with pytest.raises(redis.AuthenticationError):
            connect(f"redis://127.0.0.1:{ServiceState(data_dir, 'valkey')['port']}/0", STARTUP_CHECK).ping()
        client.close()
    with running(server.prepare(), data_dir) as process:
        assert redis.Redis.from_url(server.url).get("kept") == b"7"
    assert process.returncode == 0


def test_valkey_starts_after_a_kill_and_stops_a_leftover_server(data_dir: Path) -> None:
    server = Valkey(data_dir)
    with running(server.prepare(), data_dir) as process:
        redis.Redis.from_url(server.url).set("kept", "7")
        time.sleep(0.1)
        process.kill()
        process.wait()
    with running(server.prepare(), data_dir) as old, running(server.prepare(), data_dir):
        assert old.wait(60) == 0
        assert redis.Redis.from_url(server.url).get("kept") == b"7"


def test_secrets_are_private(data_dir: Path) -> None:
    Postgres(data_dir, durable=False).prepare()
    Valkey(data_dir).prepare()
    for name in ("postgres.json", "valkey.json", "valkey/valkey.conf"):
        assert (data_dir / name).stat().st_mode & 0o777 == 0o600


def _serve_as_user(state: Path, results: Any) -> None:
    """In a forked process, become an ordinary user and start both services."""
    os.setgroups([])
    os.setgid(NOBODY.gid)
    os.setuid(NOBODY.uid)
    server, broker = Postgres(state, durable=False), Valkey(state)
    with running(server.prepare(), state), running(broker.prepare(), state):
        client = redis.Redis.from_url(broker.url)
        results.put(
            (ask(server.owner_url, "SELECT current_user"), client.ping(), ServiceState(state, "postgres")["directory"])
        )


@as_root
def test_an_ordinary_user_runs_the_servers_as_itself(data_dir: Path) -> None:
    # Forked with all modules in memory, since that user may have no access to the interpreter, only to the servers.
    if not directories.reachable(Path(psycopg.__file__), NOBODY):
        pytest.skip("this clone lies where an ordinary user cannot go")
    os.chown(data_dir, NOBODY.uid, NOBODY.gid)
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    process = fork.Process(target=_serve_as_user, args=(data_dir, results))
    process.start()
    assert results.get(timeout=30) == ("millrace", True, str(data_dir / "postgres"))
    process.join(15)
    assert process.exitcode == 0
    assert (data_dir / "postgres" / "data").stat().st_uid == NOBODY.uid
