"""Generator of the screenshots for the site, of which six are copied to docs/screenshots (`make screenshots`).

The screenshots show the sidebar's screens, the pages of single objects, FORMS and PAGES, in light and dark, and on a
phone in light. Other forms look similar.

It starts a separate platform with the embedded model and fills it by `manage.py seed_demo`, which takes minutes. Each
page is loaded once and shown in every theme and width.
SCREENSHOTS names another directory, ONLY parts of screens' names with commas, EVENTS the number of usage events, and
LOCALE the browser's language.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from inference_worker.contract import env
from inference_worker.contract.settings import WorkerSettings, format_models
from millrace.environment.configuration import read_env_file
from tests.support.frontend.console import DEMO, FLAGS, PASSWORD, Screen, load_screens, remembered
from tests.support.frontend.pages import settle
from tests.support.stack import free_port, start, wait_for_output
from tools.screenshots import BUILT, STORED, STORED_NAMES

if TYPE_CHECKING:
    from tenants.models import User

FOLDER = Path(os.environ.get("SCREENSHOTS", BUILT))
ONLY = tuple(filter(None, os.environ.get("ONLY", "").split(",")))
EVENTS = int(os.environ.get("EVENTS", "6000"))
LOCALE = os.environ.get("LOCALE", "en-US")
MOST = 8 * 2**20
HEIGHTS = {390: (844, 2400), 1440: (900, 1600)}  # minimum and maximum, by width
SHOTS = (("light", 1440), ("dark", 1440), ("light", 390))
SHOWN = "demo-harbor"
# Screens of another tenant, by the end of the screenshot's name.
TENANTS = {
    "overview": {"": "demo-lantern", "-empty": "demo-blank", "-over": "demo-copper"},
    "requests-refused": {"": SHOWN, "-budget": "demo-copper"},
}
FORMS = (
    "budgets-new",
    "invoices-upcoming",
    "keys-new",
    "operator-deployments-new",
    "operator-deployments-new-openai",
    "operator-deployments-new-path",
    "operator-reratings",
    "requests-refused",
    "routing-edit",
    "webhooks-delivery",
)
PAGES = {  # of the owner, beside the registered screens
    "account": "/account/",
    "budgets-typed": f"/t/{SHOWN}/budgets/new?amount=10",
}


@contextmanager
def platform() -> Iterator[str]:
    """Start a platform with demo tenants, set Django up for it in this process, and yield its URL."""
    folder = Path(tempfile.mkdtemp(prefix="millrace-screenshots-"))
    folder.chmod(0o711)  # PostgreSQL may run as another user and must reach its data below
    port = free_port()
    placeholder = {"MILLRACE_VALKEY_URL": "redis://127.0.0.1:1/0", "MILLRACE_WORKER_SECRET": "w" * 32}
    models = format_models(env.load(WorkerSettings, placeholder).models)  # all bundled ones, also on a small machine
    process = start(folder / "state", port, folder / "log", MILLRACE_MODELS=models)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_output(process, folder / "log", address)
        os.environ.update(read_env_file(folder / "state" / "env"))
        os.environ.update(
            MILLRACE_DATA_DIR=str(folder / "state"),
            MILLRACE_PORT=str(port),
            MILLRACE_MODELS=models,
            DJANGO_SETTINGS_MODULE="millrace.conf.settings",
        )
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def fill() -> None:
    """Create demo tenants, two months of usage, some live requests, and an operator."""
    from django.core.management import call_command

    from tenants.models import User

    call_command("seed_demo", events=EVENTS, seconds=15, password=PASSWORD, allow_real_tenants=True)
    User.objects.create_superuser("operator@millrace.example", PASSWORD, name="Otto Operator")
    time.sleep(75)  # rollups, alerts and the operators' records are created every minute


def is_wanted(name: str) -> bool:
    """Return whether ONLY names a page. A name that ends with a dot is the complete name."""
    return any(name == part[:-1] if part.endswith(".") else part in name for part in ONLY)


def has_screenshots(name: str) -> bool:
    """Return whether a screen has screenshots."""
    from frontend.core.screens import OPERATOR, TENANT, sidebar_screens

    routes = {screen.route for package in (TENANT, OPERATOR) for screen in sidebar_screens(package)}
    return name in routes or name in FORMS or name.endswith("-detail")


def pages(screen: Screen) -> Iterator[tuple[str, User, str]]:
    """Yield the screenshots of a screen: name, user and URL. Pages without an example in the demo are left out."""
    from django.core.exceptions import ObjectDoesNotExist

    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope, tenant_scope
    from tenants.models import Tenant, User

    for suffix, slug in TENANTS.get(screen.name, {"": SHOWN}).items():
        with all_tenants_scope(BypassReason.COMMAND):
            tenant = Tenant.objects.all_tenants().get(slug=slug)
        names = set(re.findall(r"{(\w+)}", screen.url))
        try:
            with all_tenants_scope(BypassReason.OPERATOR) if screen.who == "operator" else tenant_scope(tenant):
                values = {"slug": slug} | {name: DEMO[name](tenant) for name in names - {"slug"}}
        except (LookupError, AttributeError, ObjectDoesNotExist):
            sys.stdout.write(f"{screen.name}: the demo has no such page\n")
        else:
            email = "operator@millrace.example" if screen.who == "operator" else f"owner@{slug}.example"
            yield f"{screen.name}{suffix}", User.objects.get(email=email), screen.url.format(**values)


def other_pages() -> Iterator[tuple[str, User | None, str]]:
    """Yield the screenshots of pages that belong to no tenant: name, user and URL."""
    from tenants.models import User

    yield "login", None, "/login"
    for name, url in PAGES.items():
        yield name, User.objects.get(email=f"owner@{SHOWN}.example"), url


def sign_in(browser: Browser, base: str, person: User | None) -> BrowserContext:
    """Open a window, signed in if a user is given."""
    from django.test import Client

    context = browser.new_context(base_url=base, locale=LOCALE, reduced_motion="reduce")
    if person is not None:
        client = Client()
        client.force_login(person)
        remembered(client.session)
        context.add_cookies([{"name": "sessionid", "value": client.session.session_key or "", "url": base}])
    return context


def take(context: BrowserContext, address: str) -> Iterator[tuple[str, Image.Image]]:
    """Load a page once, and yield the name's end and the picture of each screenshot. Charts follow theme and width."""
    page = context.new_page()
    page.goto(address)
    for theme, width in SHOTS:
        least, most = HEIGHTS[width]
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": least})
        settle(page)
        tall = page.evaluate("document.documentElement.scrollHeight")
        page.set_viewport_size({"width": width, "height": min(max(tall, least), most)})
        page.wait_for_timeout(200)
        yield f"{theme}-{width}", Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()


def save(picture: Image.Image, name: str) -> None:
    picture.save(FOLDER / f"{name}.webp", quality=60, method=4)


def take_all(browser: Browser, base: str, wanted: Iterable[tuple[str, User | None, str]]) -> None:
    """Take the screenshots of these pages: name, user and URL."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    contexts: dict[User | None, BrowserContext] = {}
    with ThreadPoolExecutor(1) as pool:
        for name, person, address in wanted:
            began = time.monotonic()
            if person not in contexts:
                contexts[person] = sign_in(browser, base, person)
            for end, picture in take(contexts[person], address):
                pool.submit(save, picture, f"{name}-{end}")
            sys.stdout.write(f"{time.monotonic() - began:5.1f} s  {name}\n")
            sys.stdout.flush()


def main() -> int:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.stderr.write("no Chromium on this machine\n")
        return 1
    with platform() as base:
        import django

        django.setup()
        fill()
        chosen = [each for each in load_screens() if (is_wanted(each.name) if ONLY else has_screenshots(each.name))]
        wanted = [shot for screen in chosen for shot in pages(screen)]
        wanted += [shot for shot in other_pages() if not ONLY or is_wanted(shot[0])]
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"  # Playwright keeps an event loop in this thread
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
            take_all(browser, base, wanted)
            browser.close()
    if FOLDER == BUILT:
        for path in (FOLDER / f"{name}.webp" for name in STORED_NAMES):
            if path.exists():
                shutil.copy(path, STORED)
    taken = sum(path.stat().st_size for path in FOLDER.glob("*.webp"))
    sys.stdout.write(f"{len(wanted)} pages, {taken / 2**20:.1f} MB in {FOLDER}\n")
    return 0 if taken <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
