"""The tests' own PostgreSQL and Valkey, once a session, and the environment that points Django and all else at them.

MILLRACE_TEST_DATABASE_URL and MILLRACE_TEST_VALKEY_URL name servers to use instead. The database role must be able to
create databases. The broker is emptied by tests: give it one of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_django
from hypothesis import HealthCheck, settings
from psycopg.conninfo import make_conninfo

if TYPE_CHECKING:
    from django.test import TransactionTestCase

ROOT = Path(__file__).resolve().parents[1]
sys.path += [path for path in (str(ROOT), str(ROOT / "platform")) if path not in sys.path]

# The processes of `pytest -n` share the cores: a model's threads would spend most of them on waiting for each other.
# Set before PyTorch is read, and passed on to the platforms that tests start.
if processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(processes))))

from millrace.devserver.postgres import Postgres  # noqa: E402  (after the path it needs)
from millrace.devserver.program import Program  # noqa: E402
from millrace.devserver.valkey import Valkey  # noqa: E402
from tests.emptying import empty_tables  # noqa: E402
from tests.seeing import allow_emptying  # noqa: E402

# How long things take says nothing about them on a busy machine.
settings.register_profile("millrace", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("millrace")

_running = ExitStack()
_superuser_urls: list[str] = []  # of the embedded PostgreSQL


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--browser-must-run", action="store_true", help="fail instead of skipping where there is no Chromium"
    )
    parser.addoption(
        "--unit", action="store_true", help="run only the tests that need no service, model or browser, and start none"
    )


# A test that uses one of these fixtures, directly or through another fixture, is not a unit test.
INTEGRATION_FIXTURES = {
    "broker",  # Valkey
    "browser",
    "django_db_setup",  # PostgreSQL
    "interpreter",  # Triton's interpreter, a process
    "model_dir",
    "stack",  # the whole platform
}
# Neither are the tests in these directories and files. They start processes, or need seconds for a model.
_INTEGRATION_FILES = {
    "engine": "attention batching embeddings golden host_tier invariant model_source random_steps replays sampler"
    " sampling_edits sampling_logprobs scheduling_order scheduling_work schemas structured",
    "gateway": "bodies cache_control connections doorbells prompt_pool prompts retries",
    "platform": "benchmarks headers services source_root supervisor up",
}
INTEGRATION_PATHS = {"tests/e2e", "tests/kernels"} | {
    f"tests/{directory}/test_{name}.py" for directory, names in _INTEGRATION_FILES.items() for name in names.split()
}
# Neither is a test with one of these markers.
INTEGRATION_MARKERS = ("browser", "django_db", "fault", "integration", "slow")


def _is_unit(item: pytest.Item) -> bool:
    if any(item.get_closest_marker(name) for name in INTEGRATION_MARKERS):
        return False
    return INTEGRATION_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


_PYTESTMARK = re.compile(rf"^pytestmark = .*\.(?:{'|'.join(INTEGRATION_MARKERS)})\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --unit, skip the import of files that have no unit test: it would take longer than the tests."""
    if not config.getoption("unit"):
        return None
    if str(collection_path.relative_to(ROOT)) in INTEGRATION_PATHS:
        return True
    is_test_file = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return (is_test_file and _PYTESTMARK.search(collection_path.read_text(encoding="utf-8")) is not None) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("browser") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))  # a busy machine's browser may use several of its own bounds up
    if config.getoption("unit"):
        config.hook.pytest_deselected(items=[item for item in items if not _is_unit(item)])
        items[:] = [item for item in items if _is_unit(item)]
        return
    if "slow" in str(config.getoption("markexpr")):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def _is_worker(config: pytest.Config) -> bool:
    """Whether this process only runs tests for another one (`pytest -n`), which hears of every test's end."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """Start the services and describe them in the environment, before pytest-django sets Django up.

    Each of several processes (`pytest -n`) has its own, and the one that only hands out tests has none: the others
    inherit its environment.
    """
    if getattr(config.option, "numprocesses", None) and not _is_worker(config):
        return
    given = {name: value for name, value in os.environ.items() if name.startswith("MILLRACE_")}
    for name in given:
        del os.environ[name]  # the tests' settings are their own, not those of a stack that runs here
    state = Path(tempfile.mkdtemp(prefix="millrace-tests-"))
    _running.callback(shutil.rmtree, state, ignore_errors=True)
    if os.geteuid() == 0:
        state.chmod(0o711)  # PostgreSQL runs as another user then and must reach its data below
    if config.option.unit:
        database_url = "postgresql://127.0.0.1:1/unavailable"
        broker_url = "redis://127.0.0.1:1/0"
    else:
        database_url = given.get("MILLRACE_TEST_DATABASE_URL") or _database(state)
        broker_url = given.get("MILLRACE_TEST_VALKEY_URL") or _broker(state)
    os.environ.update(
        MILLRACE_DATA_DIR=str(state),
        MILLRACE_DATABASE_URL=database_url,
        MILLRACE_VALKEY_URL=broker_url,
        MILLRACE_SECRET_KEY="tests-" + "s" * 44,
        MILLRACE_PREFIX_CACHE_SECRET="tests-" + "c" * 44,
        MILLRACE_KEY_PEPPERS="tests-" + "p" * 44,
        MILLRACE_PORT=_unused_port(),
        MILLRACE_LOG_LEVEL="warning",
        DJANGO_SETTINGS_MODULE="millrace.conf.settings",
    )
    from django.conf import settings

    settings.DATABASES  # noqa: B018  (loads them: pytest-django sets Django up if they are)
    # The product's hasher takes 0.6 seconds a password. tests/e2e sign in at platforms that use it.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    if "MILLRACE_TEST_DATABASE_URL" not in given:
        from django.test import TransactionTestCase

        TransactionTestCase._fixture_teardown = _empty_database


@pytest.fixture(scope="session")
def django_db_setup(django_db_blocker: pytest_django.DjangoDbBlocker) -> Iterator[None]:
    """The tests' database, made by the tables' owner; the tests themselves run as the app's role."""
    from django.db import connections

    owner, app = connections["owner"], connections["default"]
    with django_db_blocker.unblock():
        owner.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
        app.creation.set_as_test_mirror(owner.settings_dict)
        with owner.cursor() as cursor:
            allow_emptying(cursor)
        owner.close()
    yield
    with django_db_blocker.unblock():
        app.close()
        app.close_pool()
        name = owner.settings_dict["NAME"]
        owner.close()
        # A request that a closing browser broke off may still run in a thread of the server, with a connection.
        with owner.creation._nodb_cursor() as cursor:
            cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def as_owner() -> Callable[[], AbstractContextManager[None]]:
    """Gives a transaction as the tables' owner, who may change and empty them."""
    from django.db import connection, transaction

    @contextmanager
    def as_owner() -> Iterator[None]:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL ROLE NONE")
            yield
            with connection.cursor() as cursor:
                cursor.execute("RESET ROLE")

    return as_owner


def _empty_database(case: TransactionTestCase) -> None:
    """Empty the embedded server's test database after a test that committed."""
    from django.db import connection

    name = connection.settings_dict["NAME"]
    empty_tables(make_conninfo(_superuser_urls[0], dbname=name))


def pytest_unconfigure() -> None:
    _running.close()


def _unused_port() -> str:
    """A port at which nothing answers while the tests run, so that no test reaches a platform on this machine."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))  # and it does not listen
    _running.callback(taken.close)
    return str(taken.getsockname()[1])


def _database(state: Path) -> str:
    server = Postgres(state, durable=False)
    program = server.prepare()
    _running.callback(shutil.rmtree, server.directory, ignore_errors=True)
    _start(program, state)
    server.make_roles()
    _superuser_urls.append(server.superuser_url)
    return server.owner_url


def _broker(state: Path) -> str:
    server = Valkey(state, durable=False)
    _start(server.prepare(), state)
    return server.url


def _start(program: Program, state: Path) -> subprocess.Popen[bytes]:
    log = _running.enter_context((state / f"{program.name}.log").open("ab"))
    process = program.start(log)
    _running.callback(program.stop, process)
    return process
