"""The wizard that adds deployments, in a browser: its steps, and what was typed after a refused save."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from playwright.sync_api import Page, expect

from millrace.apps.deployments.models import Deployment
from millrace.apps.deployments.tasks import check_fit
from tenants.credentials.encryption import decrypt_secret
from tenants.models import UpstreamCredential, User
from tests.support.engine.tiny_qwen3 import write_qwen3
from tests.support.frontend.console import PASSWORD
from tests.support.frontend.sessions import forget_authentication
from tests.support.rows import unscoped
from tests.support.upstreams.fake_gateway import KEY, fake_gateway
from tests.support.upstreams.protocol_server import ProtocolServer

pytestmark = pytest.mark.usefixtures("table")
EMAIL, SECRET = "op@example.com", "sk-of-the-upstream"
# What is typed into the fields, and chosen, by the name of the field.
OWN = {
    "name": "own", "quantization": "int8", "max_model_len": "64", "pools": "default=2", "revision": "v7",
    "dtype": "float32", "kv_cache_dtype": "int8", "kv_cache_memory": "1GiB", "block_size": "16",
    "speculation": "off", "draft_model": "self:int8", "idle_seconds": "600", "default_max_tokens": "99",
    "sampling_defaults": "temperature=0.5", "tool_parser": "hermes", "reasoning_parser": "none",
    "control_tokens": "anywhere", "truncate_inputs": False, "force": False,
}  # fmt: skip
UPSTREAM = {
    "preset": "vllm", "secret": SECRET, "upstream_model": "org/model", "name": "remote", "credential_id": "",
    "allow_internal": True, "max_model_len": "4096", "concurrency": "8", "pools": "default=2", "images": True,
    "tools": False, "reasoning": True, "task": "embed", "dimensions": "384", "idle_seconds": "600",
    "default_max_tokens": "99", "force": False,
}  # fmt: skip
VALUES = """form => Object.fromEntries([...form.elements]
    .filter(field => field.name && field.type !== "hidden")
    .map(field => [field.name, field.type === "checkbox" ? field.checked : field.value]))"""


@pytest.fixture
def operator(opened: Callable[[str, str], Page], broker: redis.Redis) -> Page:
    User.objects.create_superuser(EMAIL, PASSWORD)
    return opened(EMAIL, "/operator/deployments/")


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    server = ProtocolServer()
    server.models, server.secret = ["a-model", "org/model"], SECRET
    yield server
    server.close()


def open_source(page: Page, title: str) -> None:
    page.get_by_role("link", name="Add deployment").first.click()
    page.get_by_role("link", name=title).click()
    page.locator("summary").filter(has_text="Advanced").click()


def fill(page: Page, values: dict[str, str | bool]) -> None:
    """Type into every field of the form, or choose its value."""
    form = page.locator("form[data-wizard]")
    assert set(values) == set(form.evaluate(VALUES))
    for name, value in values.items():
        field = form.locator(f"[name={name}]")
        if isinstance(value, bool):
            field.set_checked(value)
        elif field.evaluate("field => field.localName") == "select":
            field.select_option(value)
        else:
            field.fill(value)


def save(page: Page) -> None:
    page.get_by_role("button", name="Add deployment").click()


def expect_values(page: Page, values: dict[str, str | bool]) -> None:
    assert page.locator("form[data-wizard]").evaluate(VALUES) == values


def run_fit_check(broker: redis.Redis) -> None:
    """Run the next web job, as a worker of the platform would."""
    popped: Any = broker.blpop(["millrace:web:web"], timeout=10)
    check_fit(*json.loads(base64.b64decode(json.loads(popped[1])["body"]))[0])


def test_an_own_model_is_added_after_a_refused_save(operator: Page, broker: redis.Redis, tmp_path: Path) -> None:
    unreadable = tmp_path / "unreadable.gguf"
    unreadable.write_bytes(b"no GGUF")
    model = write_qwen3(tmp_path / "model")
    open_source(operator, "Path or GGUF file")
    values = OWN | {"source": str(unreadable)}
    fill(operator, values)
    save(operator)
    reason = operator.locator("#id_source_error")
    expect(reason).to_contain_text("Set force to use it anyway")
    expect(operator.locator("#id_source")).to_be_focused()
    expect_values(operator, values)

    operator.locator("#id_source").fill(str(model))
    operator.get_by_role("button", name="Check fit").click()
    expect(operator.get_by_text("The check runs.")).to_be_visible()
    run_fit_check(broker)
    expect(operator.locator("#deployment-fit")).to_contain_text("Qwen3ForCausalLM")
    values["source"] = str(model)
    expect_values(operator, values)
    save(operator)
    expect(operator.get_by_role("heading", name="Price of own")).to_be_visible()
    row = unscoped(Deployment).get(name="own")
    stored = {name: getattr(row, name) for name in values if name not in ("force", "pools")}
    assert {name: str(value) for name, value in stored.items()} == {name: str(values[name]) for name in stored}
    assert row.pools == {"default": 2}


def test_an_upstream_is_added_after_refused_saves(operator: Page, server: ProtocolServer, settings: Any) -> None:
    """The server does not send the secret back, and the field still has it."""
    open_source(operator, "OpenAI-compatible")
    values: dict[str, str | bool] = UPSTREAM | {"base_url": "http://127.0.0.1:1/v1", "secret": "sk-wrong"}
    fill(operator, values)
    save(operator)
    expect(operator.locator("#id_base_url_error")).to_contain_text("The upstream cannot be reached.")
    expect_values(operator, values)
    operator.locator("#id_base_url").fill(server.url)
    save(operator)
    expect(operator.locator("#id_secret_error")).to_contain_text("The upstream rejects the API key (status 401)")
    expect(operator.locator("#id_secret")).to_be_focused()
    values["base_url"] = server.url
    expect_values(operator, values)

    operator.locator("#id_secret").fill(SECRET)
    operator.locator("#id_upstream_model").fill("")
    operator.get_by_role("button", name="Check and list models").click()
    operator.get_by_label("Models of the upstream").select_option("org/model")
    values["secret"] = SECRET
    expect_values(operator, values)
    save(operator)
    expect(operator.get_by_role("heading", name="Price of remote")).to_be_visible()
    row = unscoped(Deployment).get(name="remote")
    same = ("preset", "upstream_model", "allow_internal", "max_model_len", "concurrency", "images", "tools", "task")
    same += ("reasoning", "dimensions", "idle_seconds", "default_max_tokens")
    assert {name: str(getattr(row, name)) for name in same} == {name: str(values[name]) for name in same}
    assert (row.engine, row.source, row.pools) == ("openai", server.url, {"default": 2})
    assert decrypt_secret(unscoped(UpstreamCredential).get(pk=row.credential_id)) == SECRET

    operator.locator("#id_uncached").fill("a lot")
    operator.locator("#id_cache_read").fill("0.25")
    operator.get_by_role("button", name="Create draft").click()
    expect(operator.locator("#id_uncached_error")).to_be_visible()
    expect(operator.locator("#id_cache_read")).to_have_value("0.25")
    operator.locator("#id_uncached").fill("2.50")
    operator.get_by_role("button", name="Create draft").click()
    expect(operator.get_by_role("heading", name="Test remote")).to_be_visible()
    expect(operator.get_by_role("link", name="must be published")).to_be_visible()

    with fake_gateway() as url:
        settings.MILLRACE = replace(settings.MILLRACE, public_url=url)
        key, prompt, result = (operator.locator(f"#{name}") for name in ("id_api_key", "id_prompt", "test-result"))
        key.fill("sk-mr-wrong")
        prompt.fill("Are you there?")
        operator.get_by_role("button", name="Send request").click()
        expect(result).to_contain_text("status 401: Wrong API key.")
        expect(key).to_have_value("sk-mr-wrong")
        expect(prompt).to_have_value("Are you there?")
        key.fill(KEY)
        operator.get_by_role("button", name="Send request").click()
        expect(result).to_contain_text(re.compile(r"Hello!\s+TTFT\s*[\d.]+ m?s\s+Tokens/s\s*\d+\.\d"))
        expect(result).to_contain_text("Cost")


def test_a_re_authentication_keeps_what_was_typed(operator: Page, server: ProtocolServer) -> None:
    """The check sends no secret before it, and the save is repeated after it."""
    open_source(operator, "Anthropic")
    form = operator.locator("form[data-wizard]")
    for name, text in (
        ("secret", SECRET),
        ("upstream_model", "org/model"),
        ("name", "remote"),
        ("base_url", server.url),
    ):
        form.locator(f"[name={name}]").fill(text)
    form.locator("[name=allow_internal]").check()
    values = form.evaluate(VALUES)
    forget_authentication()
    operator.get_by_role("button", name="Check and list models").click()
    dialog = operator.get_by_role("dialog", name="Confirm it’s you")
    dialog.get_by_role("button", name="Cancel").click()
    assert not server.received
    expect_values(operator, values)
    save(operator)
    dialog.get_by_label("Password").fill(PASSWORD)
    dialog.get_by_role("button", name="Confirm").click()
    expect(operator.get_by_role("heading", name="Price of remote")).to_be_visible()
    row = unscoped(Deployment).get(name="remote")
    assert (row.engine, row.preset, row.source) == ("anthropic", "anthropic", server.url)


def test_the_steps_are_done_by_keyboard_on_a_phone(operator: Page) -> None:
    operator.set_viewport_size({"width": 390, "height": 844})
    operator.goto("/operator/deployments/new")
    expect(operator.get_by_role("list", name="Steps").get_by_role("listitem").first).to_have_attribute(
        "aria-current", "step"
    )

    def fits() -> bool:
        return bool(operator.evaluate("document.documentElement.scrollWidth <= innerWidth"))

    assert fits()
    operator.get_by_role("link", name="Catalog").focus()
    operator.keyboard.press("Enter")
    model = operator.get_by_label("Model", exact=True)
    expect(model).to_be_visible()
    assert fits()
    model.focus()
    operator.keyboard.press("Tab")
    operator.keyboard.type("by-keyboard")
    operator.keyboard.press("Enter")
    expect(operator.get_by_role("heading", name=re.compile("Price of|Test by-keyboard"))).to_be_visible()
    assert fits()
    assert unscoped(Deployment).get(name="by-keyboard").source == "embedded"
