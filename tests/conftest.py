"""The environment of all tests, and the rules for each test directory. Fixtures are in `tests/support/fixtures`.

PostgreSQL and Valkey start once per process, if a test that is not a unit test was collected.
MILLRACE_TEST_DATABASE_URL and MILLRACE_TEST_VALKEY_URL name servers to use instead. The database role must be able to
create databases. Tests empty the broker, so use a separate one.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from psycopg.conninfo import make_conninfo

if TYPE_CHECKING:
    from django.test import TransactionTestCase

ROOT = Path(__file__).resolve().parents[1]
sys.path += [path for path in (str(ROOT), str(ROOT / "platform")) if path not in sys.path]

# The processes of `pytest -n` share the cores. With more threads than cores, a model's threads mostly wait.
# Set before PyTorch is imported, and inherited by the platforms that tests start.
if processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(processes))))

# Every new HTTP client loads the certificates of all authorities, which takes 0.07 seconds of CPU. Tests need none:
# their servers are on this machine, without TLS. A directory without certificates takes no time.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(ROOT / "tests")

from inference_worker.contract.process_memory import trim_heap  # noqa: E402
from millrace.local.postgres import ROLE  # noqa: E402  (after the path it needs)
from tests.support.database_template import VARIABLE, DatabaseTemplate  # noqa: E402
from tests.support.empty_tables import empty_tables  # noqa: E402
from tests.support.services import Services  # noqa: E402
from tests.support.static_files import scan_static_files_once  # noqa: E402

pytest_plugins = [
    f"tests.support.fixtures.{name}"
    for name in ("billing", "budgets", "console", "database", "platform", "process", "replicas", "services", "tenants")
]

# Durations are not meaningful on a busy machine.
settings.register_profile("millrace", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("millrace")

UNIT = ROOT / "tests" / "unit"
PLATFORM = [ROOT / "tests" / name for name in ("browser", "e2e", "faults")]  # a whole platform, or a browser
WAITING = ROOT / "tests" / "integration" / "gateway"  # its tests wait for timeouts more than they compute
# Files that `pytest -n` runs in one process, so that it starts one platform for all of them: 50 seconds of CPU.
ONE_PROCESS = "tests/e2e/"
# The files of the fixture `interpreter`, for the same reason: a process with PyTorch and Triton, 365 MB.
INTERPRETED = tuple(
    f"tests/integration/kernels/test_{name}.py" for name in ("backend", "decode", "prefill", "rope", "small_kernels")
)
# The longest file of the browser tests, half of their time. Last, it would run while the other processes have ended.
LONGEST = "tests/browser/test_screens.py"
# A unit test uses none of these, neither directly nor through another fixture.
INTEGRATION_FIXTURES = {
    "async_broker",  # Valkey
    "broker",
    "browser",
    "django_db_setup",  # PostgreSQL
    "interpreter",  # Triton's interpreter, a process
    "live",  # the console behind uvicorn
    "model_dir",
    "settler_broker",
    "stack",  # the whole platform
    "start_settler",
}
PLATFORM_TIMEOUT_SECONDS = 600  # with the start of the platform, on a busy machine

MAX_GROWTH_BYTES = 2**26
GC_THRESHOLDS = (50_000, 10, 10)  # the default of 700 objects is for small programs

_grown_files: set[Path] = set()
_services: list[Services] = []
_templates: list[DatabaseTemplate] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--browser-must-run", action="store_true", help="fail instead of skipping where there is no Chromium"
    )


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: the processes of `pytest -n` must agree on names, and gzip's output has a time."""
    return f"{len(val)} bytes" if isinstance(val, bytes) and len(val) > 16 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(path) for path in PLATFORM) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PLATFORM_TIMEOUT_SECONDS))
    _check_unit_tests([item for item in items if item.path.is_relative_to(UNIT)])
    if "slow" in str(config.getoption("markexpr")):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    if _is_worker(config):
        items.sort(key=lambda item: item.path)  # `_rotate_directories` has changed the order
    items[:] = _spread([item for item in items if not item.get_closest_marker("slow")])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of `--dist loadfile`.

    It gives the files of ONE_PROCESS to one process, and those of INTERPRETED.
    """
    from xdist.scheduler import LoadFileScheduling  # here: only `pytest -n` needs it

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for scope, files in (("platform", ONE_PROCESS), ("interpreter", INTERPRETED)):
                if nodeid.startswith(files):
                    return scope
            return str(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put ONE_PROCESS and LONGEST first, and the files of WAITING between the others, at equal distances.

    The other processes run the rest meanwhile, and while tests wait, others compute.
    """
    first = [item for item in items if item.nodeid.startswith((ONE_PROCESS, LONGEST))]
    shared = {item.path for item in first if "stack" in getattr(item, "fixturenames", ())}
    first.sort(key=lambda item: item.path in shared)  # tests with platforms of their own, before the shared one starts
    waiting, computing = [], []
    rest = (item for item in items if not item.nodeid.startswith((ONE_PROCESS, LONGEST)))
    for path, tests in itertools.groupby(rest, key=lambda item: item.path):
        (waiting if path.is_relative_to(WAITING) else computing).append(list(tests))
    distance = len(computing) / (len(waiting) + 1)
    for number, tests in reversed(list(enumerate(waiting, 1))):
        computing.insert(round(number * distance), tests)
    return first + [item for tests in computing for item in tests]


def _rotate_directories(config: pytest.Config) -> None:
    """Let each process of `pytest -n` begin to collect at another directory.

    Otherwise all of them import the same module at the same time, and in a fresh clone each compiles it.
    """
    arguments = [Path(name) for name in config.args]
    if not all(path.is_dir() for path in arguments):
        return
    directories = sorted({str(file.parent) for path in arguments for file in path.rglob("test_*.py")})
    number, count = (
        int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")),
        int(os.environ["PYTEST_XDIST_WORKER_COUNT"]),
    )
    first = len(directories) * number // count
    config.args[:] = directories[first:] + directories[:first]


def _check_unit_tests(items: list[pytest.Item]) -> None:
    """Raise an error that names the unit tests with fixtures that start a service, a browser, a model or a process."""
    found = []
    for item in items:
        used = INTEGRATION_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if item.get_closest_marker("django_db"):
            used.add("django_db")
        if used:
            found.append(f"{item.nodeid} uses {', '.join(sorted(used))}")
    if found:
        raise pytest.UsageError("move these out of tests/unit:\n" + "\n".join(found))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[Any]:
    """Collect tests without garbage collections, and leave the modules of the tests out of the later ones.

    Each of them would visit millions of objects that stay until the process ends: a third of the CPU time of collecting
    tests, and a fifth of that of many tests.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """Return freed memory to the system after a test with which the process has grown, and at the end of its file.

    Otherwise the C library keeps what the load of a model and its weights took, up to a gigabyte in each process.
    """
    before = _resident_bytes()
    result = yield
    has_grown = _resident_bytes() > before + MAX_GROWTH_BYTES
    if has_grown:
        _grown_files.add(item.path)
    if has_grown or (item.path in _grown_files and (nextitem is None or nextitem.path != item.path)):
        trim_heap()
    return result


def _resident_bytes() -> int:
    with contextlib.suppress(OSError):  # not Linux
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the services if a test may need them."""
    if session.config.option.collectonly or all(item.path.is_relative_to(UNIT) for item in session.items):
        return
    for services in _services:
        services.start()


def _is_worker(config: pytest.Config) -> bool:
    """Return whether this process only runs tests for another one (`pytest -n`), which receives every result."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the services in the environment, before pytest-django sets Django up.

    Each worker process of `pytest -n` has its own services. The process that distributes the tests has none, because
    the workers inherit its environment. They share a template of the database.
    """
    if getattr(config.option, "numprocesses", None) and not _is_worker(config):
        _templates.append(DatabaseTemplate.create())
        return
    if _is_worker(config):
        _rotate_directories(config)
    kept = ("MILLRACE_TEST_MODELS",)  # of tests/models
    given = {name: value for name, value in os.environ.items() if name.startswith("MILLRACE_") and name not in kept}
    for name in given:
        del os.environ[name]  # settings of a platform that runs on this machine do not apply
    template = DatabaseTemplate(Path(given[VARIABLE])) if _is_worker(config) else None
    services = Services(given.get("MILLRACE_TEST_DATABASE_URL"), given.get("MILLRACE_TEST_VALKEY_URL"), template)
    _services.append(services)
    os.environ.update(
        MILLRACE_DATA_DIR=str(services.data_dir),
        MILLRACE_DATABASE_URL=services.database_url,
        MILLRACE_VALKEY_URL=services.broker_url,
        MILLRACE_SECRET_KEY="tests-" + "s" * 44,
        MILLRACE_PREFIX_CACHE_SECRET="tests-" + "c" * 44,
        MILLRACE_KEY_PEPPERS="tests-" + "p" * 44,
        MILLRACE_CREDENTIAL_KEYS="tests-" + "e" * 44,
        MILLRACE_WORKER_SECRET="tests-" + "w" * 44,
        MILLRACE_PORT=str(services.unused_port),  # no test reaches a platform on this machine
        MILLRACE_LOG_LEVEL="warning",
        DJANGO_SETTINGS_MODULE="millrace.conf.settings",
    )
    from django.conf import settings

    settings.DATABASES  # noqa: B018  (loads them: pytest-django sets Django up if they are)
    # The product's hasher takes 0.6 seconds a password. tests/e2e sign in at platforms that use it.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    scan_static_files_once()
    if "MILLRACE_TEST_DATABASE_URL" not in given:
        from django.test import TransactionTestCase

        TransactionTestCase._fixture_teardown = _empty_database
        if template:
            settings.DATABASES["owner"]["TEST"] = {"TEMPLATE": ROLE}


def pytest_unconfigure() -> None:
    while _services:
        _services.pop().close()
    while _templates:
        _templates.pop().remove()


def _empty_database(case: TransactionTestCase) -> None:
    """Empty the embedded server's test database after a test that committed."""
    from django.db import connection

    empty_tables(make_conninfo(_services[0].superuser_url, dbname=connection.settings_dict["NAME"]))
