"""Cache warming in a browser: stored prompts are searched, one is selected, and a job warms it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from millrace.apps.answer_caches.models import WarmedPrompt
from tenants.jobs import run_jobs
from tests.support.answer_caches.cache_warming import NANO, Asker, current, enable_warming, make_prices
from tests.support.rows import of

pytestmark = [pytest.mark.usefixtures("table"), pytest.mark.acme("Acme Robotics", roles=["owner"])]


def test_a_prompt_is_selected_and_warmed(acme, opened):
    make_prices()
    enable_warming(acme, 0)
    asker = Asker(acme, datetime.now(UTC))
    asker.ask_daily("Where is my order?")
    asker.ask_daily("When does the shop open? " * 20)
    page = opened("owner@example.com", "/t/acme/usage/")
    page.get_by_role("link", name="Cache warming").click()
    page.get_by_role("button", name="Search prompts").click()
    page.get_by_text("The stored prompts are being searched.").wait_for()
    assert run_jobs() == 1
    page.reload()
    page.get_by_label("Select Where is my order?").check()
    page.get_by_role("button", name="Warm selected").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("heading", name="Warm 1 prompt").wait_for()
    dialog.get_by_label("Budget per day").fill("0")
    dialog.get_by_role("button", name="Save and start").click()
    dialog.get_by_text("Enter more than 0.").wait_for()
    dialog.get_by_label("Budget per day").fill("0.50")
    dialog.get_by_role("button", name="Save and start").click()
    page.get_by_text("The selected prompts are being warmed.").wait_for()
    assert run_jobs() == 1
    page.reload()
    page.get_by_text("Computed ahead: 1").wait_for()
    page.get_by_text("Cached", exact=True).wait_for()
    assert page.get_by_label("Select Where is my order?").count() == 0
    assert page.get_by_label("Select When does the shop open?").count() == 1
    (row,) = of(WarmedPrompt, acme)
    assert (row.cache, row.key_id) == ("answer", asker.key.pk)
    assert current(acme).cache_warming_nano == NANO // 2
