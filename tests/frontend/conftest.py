from __future__ import annotations

import copy
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, sync_playwright

from tests.frontend.console import FLAGS, PASSWORD, Undefined, meter


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium. Playwright keeps an event loop in this thread, which Django would take for a mistake."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine: install the package `chromium` to run the browser tests")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield running
        running.close()
    del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture(scope="session")
def served(django_db_setup: None) -> Iterator[str]:
    """Django behind uvicorn, as it is served; gives its address."""
    from django.core.asgi import get_asgi_application

    config = uvicorn.Config(get_asgi_application(), "127.0.0.1", 0, log_level="error", lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join()


@pytest.fixture(autouse=True)
def _strict_templates(request: pytest.FixtureRequest, settings: Any) -> None:
    if "browser" in request.keywords:
        return  # those pages include Django's own, which do ask for undefined names
    templates = copy.deepcopy(settings.TEMPLATES)
    templates[0]["OPTIONS"]["string_if_invalid"] = Undefined("%s")
    settings.TEMPLATES = templates


@pytest.fixture
def use() -> Callable[..., str]:
    """Meters one leg for a tenant, as the settler does; gives the request's id."""
    return meter


@pytest.fixture
def table(transactional_db: None, as_owner: Any) -> Iterator[None]:
    """Real commits; the usage they leave is taken out past the triggers that forbid it."""
    from django.db import connection

    yield
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE billing_usageevent DISABLE TRIGGER USER")
        cursor.execute("DELETE FROM billing_usageevent")
        cursor.execute("ALTER TABLE billing_usageevent ENABLE TRIGGER USER")


@pytest.fixture
def demo(table: None) -> Any:
    """The demo tenants with a few hundred requests each, and people who log in with `console.PASSWORD`."""
    from millrace.demo.running import play  # here: this file is read before Django is set up

    return play(events=200, password=PASSWORD)
