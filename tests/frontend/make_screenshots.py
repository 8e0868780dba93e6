"""Takes docs/screenshots anew: each registered screen of a demo tenant, light and dark, on a phone and on a desk.

Not a test: `make screenshots` runs it. SCREENSHOTS names another folder; ONLY, a part of a screen's name.
"""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from PIL import Image
from playwright.sync_api import Browser

from tests.frontend.console import DEMO, PASSWORD, load_screens

FOLDER = Path(os.environ.get("SCREENSHOTS", "docs/screenshots"))
ONLY = os.environ.get("ONLY", "")
MOST = 8 * 2**20
WIDTHS = {390: 844, 1440: 900}
TALLEST = {390: 3600, 1440: 2000}
SHOWN = "demo-harbour"
OVERVIEWS = {"": "demo-lantern", "-empty": "demo-blank", "-over": "demo-copper"}


@pytest.mark.timeout(3000)
def test_take_them(browser: Browser, served: str, transactional_db: None) -> None:
    from billing import rollups, status
    from millrace.demo import running
    from tenants.models import Tenant, User
    from tenants.roles import SystemUse
    from tenants.scoping import system, tenant_scope

    running.play(events=int(os.environ.get("EVENTS", "6000")), password=PASSWORD)
    time.sleep(6)  # rollups leave out what was settled in the last seconds
    rollups.build()
    now = int(time.time() * 1e6)
    with redis.Redis.from_url(settings.CACHES["default"]["LOCATION"]) as broker:
        broker.set(status.STATUS_KEY, status.encode(status.SettlerStatus(now, "s", 0, 0, 0, None, 0, lag_ms=0)))
    with system(SystemUse.COMMAND):
        tenants = {tenant.slug: tenant for tenant in Tenant.objects.all_tenants()}
    operator = User.objects.create_superuser("operator@millrace.example", PASSWORD, name="Otto Operator")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for screen in load_screens():
        if ONLY not in screen.name:
            continue
        slugs = OVERVIEWS if screen.name == "overview" else {"": SHOWN}
        for suffix, slug in slugs.items():
            values: dict[str, object] = {"slug": slug}
            with tenant_scope(tenants[slug]):
                for name in re.findall(r"{(\w+)}", screen.url):
                    if name in DEMO:
                        values[name] = DEMO[name](tenants[slug])
            if set(re.findall(r"{(\w+)}", screen.url)) - set(values):
                continue  # a page of what the demo has none of
            person = operator if screen.who == "operator" else User.objects.get(email=f"owner@{slug}.example")
            _take(browser, served, person, screen.url.format(**values), f"{screen.name}{suffix}")
    taken = sum(path.stat().st_size for path in FOLDER.glob("*.webp"))
    assert taken <= MOST, taken


def _take(browser: Browser, served: str, person: Any, address: str, name: str) -> None:
    from django.test import Client

    from tests.frontend.console import remembered

    client = Client()
    client.force_login(person)
    remembered(client.session)
    for theme in ("light", "dark"):
        for width, height in WIDTHS.items():
            context = browser.new_context(
                base_url=served,
                color_scheme=theme,
                viewport={"width": width, "height": height},
                reduced_motion="reduce",
            )
            context.add_cookies([{"name": "sessionid", "value": client.session.session_key, "url": served}])
            page = context.new_page()
            page.goto(address, wait_until="networkidle")
            tall = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({"width": width, "height": min(max(tall, height), TALLEST[width])})
            page.wait_for_timeout(250)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.save(FOLDER / f"{name}-{theme}-{width}.webp", quality=75, method=6)
            context.close()
