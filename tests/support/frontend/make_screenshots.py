"""Generator of docs/screenshots (`make screenshots`): each screen in light and dark, narrow and wide.

The screenshots show the sidebar's screens, the pages of single objects, and FORMS; other forms look similar.

It starts a separate platform with the embedded model and fills it by `manage.py seed_demo`, which takes minutes.
SCREENSHOTS names another directory, ONLY a part of a screen's name, and EVENTS the number of usage events.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from millrace.conf.environment import read_env_file
from tests.support.frontend.console import DEMO, FLAGS, PASSWORD, Screen, load_screens, remembered
from tests.support.stack import START_SECONDS, free_port, start

if TYPE_CHECKING:
    from tenants.models import User

FOLDER = Path(os.environ.get("SCREENSHOTS", "docs/screenshots"))
ONLY = os.environ.get("ONLY", "")
EVENTS = int(os.environ.get("EVENTS", "6000"))
MOST = 8 * 2**20
HEIGHTS = {390: (844, 3600), 1440: (900, 2000)}  # minimum and maximum, by width
SHOWN = "demo-harbor"
FORMS = ("invoices-upcoming", "keys-new", "budgets-new")
OVERVIEWS = {"": "demo-lantern", "-empty": "demo-blank", "-over": "demo-copper"}


@contextmanager
def platform() -> Iterator[str]:
    """Start a platform with demo tenants, set Django up for it in this process, and yield its URL."""
    folder = Path(tempfile.mkdtemp(prefix="millrace-screenshots-"))
    folder.chmod(0o711)  # PostgreSQL may run as another user and must reach its data below
    port = free_port()
    process = start(folder / "state", port, folder / "log")
    address = f"http://127.0.0.1:{port}"
    try:
        give_up_at = time.monotonic() + 2 * START_SECONDS
        while address not in (folder / "log").read_text():
            assert process.poll() is None and time.monotonic() < give_up_at, (folder / "log").read_text()
            time.sleep(0.5)
        os.environ.update(read_env_file(folder / "state" / "env"))
        os.environ.update(
            MILLRACE_DATA_DIR=str(folder / "state"),
            MILLRACE_PORT=str(port),
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


def has_screenshots(name: str) -> bool:
    """Return whether a screen has screenshots."""
    from frontend.core.navigation import OPERATOR, TENANT

    entries = {entry.route for group in (*TENANT, *OPERATOR) for entry in group.entries}
    return name in entries or name in FORMS or name.endswith("-detail")


def pages(screen: Screen) -> Iterator[tuple[str, User, str]]:
    """Yield the screenshots of a screen: name, user and URL. Pages without an example in the demo are left out."""
    from django.core.exceptions import ObjectDoesNotExist

    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope, tenant_scope
    from tenants.models import Tenant, User

    for suffix, slug in (OVERVIEWS if screen.name == "overview" else {"": SHOWN}).items():
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


def take(browser: Browser, base: str, person: Any, address: str, name: str) -> None:
    """Take four screenshots of a page."""
    from django.test import Client

    client = Client()
    client.force_login(person)
    remembered(client.session)
    for theme in ("light", "dark"):
        for width, (least, most) in HEIGHTS.items():
            size = {"width": width, "height": least}
            context = browser.new_context(base_url=base, color_scheme=theme, viewport=size, reduced_motion="reduce")
            context.add_cookies([{"name": "sessionid", "value": client.session.session_key or "", "url": base}])
            page = context.new_page()
            page.goto(address, wait_until="networkidle")
            tall = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({"width": width, "height": min(max(tall, least), most)})
            page.wait_for_timeout(300)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.save(FOLDER / f"{name}-{theme}-{width}.webp", quality=75, method=6)
            context.close()


def main() -> int:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.stderr.write("no Chromium on this machine\n")
        return 1
    with platform() as base:
        import django

        django.setup()
        fill()
        chosen = [each for each in load_screens() if (ONLY in each.name if ONLY else has_screenshots(each.name))]
        wanted = [shot for screen in chosen for shot in pages(screen)]
        FOLDER.mkdir(parents=True, exist_ok=True)
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"  # Playwright keeps an event loop in this thread
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
            for name, person, address in wanted:
                take(browser, base, person, address, name)
            browser.close()
    taken = sum(path.stat().st_size for path in FOLDER.glob("*.webp"))
    sys.stdout.write(f"{len(wanted)} pages, {taken / 2**20:.1f} MB in {FOLDER}\n")
    return 0 if taken <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
