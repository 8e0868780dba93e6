"""The playground in Chromium on a whole platform: streaming, costs, cancellation and rejections."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Page, expect

from tests.support.frontend.pages import chromium, windows
from tests.support.stack import MODEL, Stack, eventually

ANSWERED = re.compile("Complete|Cut at the output limit")  # whether it fits is up to the model
LONG = "Tell me a very long story about a miller and a goose."


@pytest.fixture(scope="module")
def signed_in(stack: Stack, pytestconfig: pytest.Config) -> Iterator[Page]:
    """The owner's browser, on the demo tenant's playground."""
    kept = json.loads((stack.data_dir / "credentials.json").read_text())
    with chromium(pytestconfig) as browser, windows(browser) as window:
        page = window(base_url=stack.url).new_page()
        page.goto("/login")
        page.get_by_label("Email address").fill(kept["owner_email"])
        page.get_by_label("Password").fill(kept["owner_password"])
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/t/demo/**")
        yield page


@pytest.fixture
def page(signed_in: Page) -> Iterator[Page]:
    complaints: list[str] = []

    def complain(message: Any) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    signed_in.on("console", complain)
    signed_in.goto("/t/demo/playground/")
    yield signed_in
    signed_in.remove_listener("console", complain)
    assert complaints == []


def submit(page: Page, prompt: str, max_tokens: int | None = None, temperature: str = "0") -> None:
    page.get_by_label("Max output tokens").fill("" if max_tokens is None else str(max_tokens))
    page.get_by_label("Temperature").fill(temperature)
    page.get_by_label("Message").fill(prompt)
    user_messages = page.locator(".chat-message.user:visible")
    before = user_messages.count()
    page.get_by_label("Message").press("Control+Enter")
    expect(user_messages).to_have_count(before + 1)  # sent once the WebSocket is open


def column(page: Page) -> Any:
    return page.get_by_role("region", name=f"Answers of {MODEL}")


def state(page: Page) -> Any:
    return column(page).locator("[data-state]")


def figure(page: Page, name: str) -> str:
    return str(column(page).locator(f"[data-{name}]").inner_text())


def test_output_is_streamed_and_its_cost_equals_the_usage_event(page, stack):
    submit(page, "What is the capital of France?", 24)
    expect(state(page)).to_have_text(ANSWERED, timeout=60_000)
    assert "Paris" in column(page).locator(".chat-message.assistant").inner_text()
    assert re.fullmatch(r"\d+ ms|\d+\.\d\d s", figure(page, "ttft"))
    (request_id,) = re.findall(r"req_[0-9a-f]{32}", column(page).inner_html())[:1]
    event = stack.event(request_id)
    assert figure(page, "output") == str(event["output"])
    assert int(figure(page, "input")) + int(figure(page, "cached")) == event["uncached"] + event["cache_read"]
    exact = column(page).locator("[data-cost]").get_attribute("title")
    assert exact is not None and Decimal(exact.removeprefix("$")) == Decimal(event["cost"]["usd"]) > 0
    # The second turn reads the first from the cache.
    submit(page, "And of Italy?", 8)
    expect(state(page)).to_have_text(ANSWERED, timeout=60_000)
    expect(column(page).locator(".chat-message")).to_have_count(4)


def test_the_sampling_parameters_of_the_models_deployment_are_shown(page):
    submit(page, "Hello", 4)
    expect(state(page)).to_have_text(ANSWERED, timeout=60_000)
    assert not column(page).get_by_text("Sampling defaults").is_visible()  # greedy requests take none
    submit(page, "Hello again", 4, temperature="")
    expect(column(page).locator("[data-sampling]")).to_have_text("temperature=0.2, top_p=0.9")  # of the model's card
    expect(state(page)).to_have_text(ANSWERED, timeout=60_000)


def test_escape_cancels_the_request(page):
    submit(page, LONG, 1500)
    expect(state(page)).to_have_text("Answering", timeout=60_000)
    page.keyboard.press("Escape")
    expect(state(page)).to_have_text("Stopped", timeout=60_000)
    assert int(figure(page, "output")) < 1500


def test_a_rejection_names_the_budget_and_a_raised_budget_admits_again(page, stack):
    """The budget is 66 output tokens. A request without max_tokens uses the rest, and then no request fits."""
    body = {"name": "A tenth of a cent", "unit": "money", "period": "month", "amount": 1_000_000}
    response = httpx2.post(f"{stack.url}/api/budgets", json=body, headers=stack.headers)
    assert response.status_code == 201, response.text
    one = f"{stack.url}/api/budgets/{response.json()['id']}"
    try:
        for _ in range(20):
            submit(page, LONG)
            expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=90_000)
            if state(page).inner_text() == "Rate limited":
                break
        refusal = column(page).locator(".chat-message.field-error").inner_text()
        assert "monthly budget 'A tenth of a cent' does not allow this request" in refusal
        assert "(budget_exceeded)" in refusal
        raised = {"amount": 50_000_000}
        assert httpx2.patch(one, json=raised, headers=stack.headers).status_code == 200

        def passes() -> bool:
            submit(page, "Hello!", 8)
            expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)
            return ANSWERED.fullmatch(state(page).inner_text()) is not None

        eventually(passes)
    finally:
        assert httpx2.delete(one, headers=stack.headers).status_code == 204


def test_the_request_is_shown_in_four_languages(page):
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Message").fill("It's me")
    page.get_by_role("tab", name="curl").click()
    curl = page.get_by_role("region", name="curl").inner_text()
    assert "$MILLRACE_API_KEY" in curl and "It'\\''s me" in curl and "Be brief." in curl
    page.get_by_role("tab", name="curl").press("ArrowRight")
    anthropic = page.get_by_role("region", name="Anthropic SDK").inner_text()
    assert 'content": "It\'s me"' in anthropic and 'system="Be brief."' in anthropic and "max_tokens=1024" in anthropic
    page.get_by_role("tab", name="Node").click()
    assert "new OpenAI({ baseURL:" in page.get_by_role("region", name="Node").inner_text()
    page.get_by_role("tab", name="Python").click()
    assert 'content": "It\'s me"' in page.get_by_role("region", name="Python").inner_text()


def test_a_playground_token_opens_only_one_websocket(page, stack):
    """A token is not an API key, and cannot be used twice."""
    token = page.evaluate(
        """async () => {
          const form = document.querySelector("[data-playground]").elements;
          const response = await fetch("/t/demo/playground/token", { method: "POST",
            body: new URLSearchParams({ key: form.key.value }),
            headers: { "X-CSRFToken": form.csrfmiddlewaretoken.value } });
          return (await response.json()).playground_token;
        }"""
    )
    open_websocket = """(playground_token) => new Promise((resolve) => {
      const socket = new WebSocket(location.origin.replace("http", "ws") + "/v1/realtime/chat");
      socket.onopen = () => socket.send(JSON.stringify({ type: "auth", playground_token }));
      socket.onmessage = ({ data }) => resolve(JSON.parse(data));
    })"""
    assert page.evaluate(open_websocket, token)["type"] == "ready"
    second = page.evaluate(open_websocket, token)
    assert second["type"] == "error" and "used before" in second["error"]["message"]
    assert page.evaluate(open_websocket, token[:-4] + "AAAA")["error"]["code"] == "invalid_api_key"
    response = httpx2.get(f"{stack.url}/v1/models", headers={"authorization": f"Bearer {token}"})
    assert response.status_code == 401
