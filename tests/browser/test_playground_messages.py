"""What the playground shows if a server fails, and how an answer ended; the test is the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, WebSocketRoute, expect

from tenants import actions
from tenants.models import User
from tests.support.rows import only_project

pytestmark = pytest.mark.usefixtures("table", "all_models_served")
MODEL = "smollm2-135m"
TOKEN_URL = "**/t/acme/playground/token"
STARTED = {"type": "started", "request_id": "req_1", "model": MODEL}
DONE = {"type": "done"}


@pytest.fixture
def page(opened: Callable[[str, str], Page]) -> Page:
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_add_member(tenant, User.objects.create_user("owner@example.com"), "owner")
    actions.do_create_api_key(only_project(tenant), "prod")
    return opened("owner@example.com", "/t/acme/playground/")


def send(page: Page) -> None:
    page.get_by_label("Message").fill("Hello!")
    page.get_by_role("button", name="Send").click()


def chunk(text: str = "", reason: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text, **delta}, "finish_reason": reason}
    return {"type": "chunk", "chunk": {"model": MODEL, "choices": [choice]}}


def call(index: int, name: str, arguments: str) -> dict[str, Any]:
    return chunk(
        tool_calls=[{"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": arguments}}]
    )


def usage(output: int, reasoning: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": 0, "cache_write_tokens": 0}
    counts = {
        "prompt_tokens": 5,
        "completion_tokens": output,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    return {"type": "chunk", "chunk": {"model": MODEL, "choices": [], "usage": counts}}


def answer_with(page: Page, *messages: dict[str, Any] | None) -> None:
    """Play the gateway: it answers each request with these messages. None closes the connection."""

    def serve(socket: WebSocketRoute) -> None:
        def receive(text: str | bytes) -> None:
            sent = json.loads(text)
            if sent.get("type") == "auth":
                socket.send(json.dumps({"type": "ready"}))
                return
            for message in messages:
                if message is None:
                    socket.close()
                else:
                    socket.send(json.dumps({"id": sent["id"], **message}))

        socket.on_message(receive)

    page.route_web_socket("**/v1/realtime/chat", serve)
    page.reload()


def state(page: Page) -> Locator:
    return page.locator("[data-state]")


def notes(page: Page) -> Locator:
    return page.locator(".chat-message:not(.user):not(.assistant)")


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (500, "The server responded with status 500 to req_7. Try again. If it keeps failing, contact the operator."),
        (502, "The server responded with status 502 to req_7. Try again. If it keeps failing, contact the operator."),
        (429, "The server responded with status 429 to req_7. Wait a minute, then try again."),
    ],
)
def test_an_error_page_is_a_message_with_its_status(page, status, text):
    def fail(route: Route) -> None:
        route.fulfill(
            status=status, headers={"x-request-id": "req_7"}, content_type="text/html", body="<!doctype html>"
        )

    page.route(TOKEN_URL, fail)
    send(page)
    expect(page.get_by_role("alert")).to_have_text(text)
    expect(page.get_by_label("Message")).to_have_value("Hello!")
    page.unroute(TOKEN_URL)
    answer_with(page, STARTED, chunk("Hi", "stop"), DONE)
    send(page)
    expect(state(page)).to_have_text("Complete")


def test_a_page_without_session_token_or_server_asks_to_sign_in_to_reload_or_to_wait(page):
    page.context.clear_cookies(name="sessionid")
    send(page)
    expect(page.get_by_role("alert")).to_have_text("You are signed out. Reload the page and sign in.")
    page.context.clear_cookies(name="csrftoken")
    send(page)
    expect(page.get_by_role("alert")).to_contain_text("status 403")
    expect(page.get_by_role("alert")).to_contain_text("Reload the page and try again.")
    page.route(TOKEN_URL, lambda route: route.abort())
    send(page)
    expect(page.get_by_role("alert")).to_have_text("Cannot reach the console. Check your connection and try again.")


def test_a_rejected_token_shows_the_servers_reason(page):
    key = page.get_by_label("API key")
    key.evaluate("element => (element.selectedOptions[0].value = '999999')")
    send(page)
    expect(page.get_by_role("alert")).to_contain_text("This key was revoked or has no inference permission.")


@pytest.mark.parametrize(
    ("messages", "limit", "badge", "note"),
    [
        ([chunk("Paris", "stop"), usage(1), DONE], 9, "Complete", ""),
        ([chunk("Par", "length"), usage(9), DONE], 9, "Cut at the output limit", "reached Max output tokens (9)"),
        ([chunk("Par", "length"), usage(7), DONE], 9, "Cut at the output limit", "Start a new conversation"),
        ([chunk("Par", "length"), usage(7), DONE], None, "Cut at the output limit", "or raise the budget"),
        ([chunk("Par", "tool_calls"), DONE], None, "Tool call", ""),
        ([chunk("Par", "content_filter"), DONE], None, "Ended: content_filter", ""),
        ([chunk("Par"), None], None, "Connection lost", "Send the prompt again."),
        (
            [chunk("Par"), {"type": "error", "error": {"code": "internal_error", "message": "It failed."}}],
            None,
            "Failed",
            "It failed. (internal_error)",
        ),
    ],
    ids=["stop", "limit", "budget", "context", "tool", "other", "lost", "failed"],
)
def test_the_badge_is_how_the_answer_ended(page, messages, limit, badge, note):
    answer_with(page, STARTED, *messages)
    page.get_by_label("Max output tokens").fill("" if limit is None else str(limit))
    send(page)
    expect(state(page)).to_have_text(badge)
    expect(page.locator("[data-status]")).to_contain_text(f"{MODEL}: {badge}")
    expect(notes(page)).to_have_count(1 if note else 0)
    if note:
        expect(notes(page)).to_contain_text(note)


def test_a_request_that_never_started_is_rejected(page):
    error = {"code": "context_length_exceeded", "message": "The prompt is too long."}
    answer_with(page, {"type": "error", "error": error})
    send(page)
    expect(state(page)).to_have_text("Rejected")
    expect(notes(page)).to_have_text("The prompt is too long. (context_length_exceeded)")


def test_reasoning_is_a_block_of_its_own_that_closes_when_the_answer_begins(page):
    thinking = [chunk(reasoning_content="The user "), chunk(reasoning_content="says <b>hello</b>.")]
    answer_with(page, STARTED, *thinking, chunk("Hi "), chunk("there!", "stop"), usage(1234, 1200), DONE)
    sent: list[Any] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda text: sent.append(text)))
    send(page)
    expect(state(page)).to_have_text("Complete")
    message = page.locator(".chat-message.assistant")
    block = message.locator("details")
    assert block.get_attribute("open") is None
    expect(block.locator("div")).to_be_hidden()
    expect(message.locator("> div")).to_have_text("Hi there!")
    expect(page.locator("[data-output]")).to_have_attribute("title", "1,200 of them reasoning")
    block.get_by_text("Reasoning").click()
    expect(block.locator("div")).to_have_text("The user says <b>hello</b>.")
    # The next prompt has the answer without the reasoning.
    page.get_by_label("Message").fill("Again")
    expect(page.locator("#code-python code")).to_contain_text('"content": "Hi there!"')
    assert "The user says" not in page.locator("#code-python code").inner_text()


def test_reasoning_is_open_until_the_answer_begins(page):
    answer_with(page, STARTED, chunk(reasoning_content="Hm. Let me see."))
    send(page)
    expect(page.locator(".chat-message.assistant details div")).to_be_visible()
    expect(state(page)).to_have_text("Answering")


def test_tool_calls_are_shown_with_their_arguments(page):
    parts = [call(0, "weather", '{"city": "Pa'), chunk(tool_calls=[{"index": 0, "function": {"arguments": 'ris"}'}}])]
    answer_with(page, STARTED, *parts, call(1, "time", "{}"), chunk("", "tool_calls"), DONE)
    send(page)
    expect(state(page)).to_have_text("Tool call")
    calls = page.locator(".chat-tool-call")
    expect(calls.locator("h3")).to_have_text(["Tool call: weather", "Tool call: time"])
    expect(calls.first.locator("pre")).to_have_text('{\n  "city": "Paris"\n}', use_inner_text=True)
    expect(page.get_by_label("Message")).to_have_value("")


def test_a_failed_request_can_be_sent_again(page):
    answer_with(page, STARTED, chunk("Par"), None)
    send(page)
    expect(state(page)).to_have_text("Connection lost")
    answers: list[dict[str, Any]] = []

    def serve(socket: WebSocketRoute) -> None:
        def receive(text: str | bytes) -> None:
            sent = json.loads(text)
            if sent.get("type") == "auth":
                socket.send(json.dumps({"type": "ready"}))
                return
            answers.append(sent)
            for message in (STARTED, chunk("Paris", "stop"), DONE):
                socket.send(json.dumps({"id": sent["id"], **message}))

        socket.on_message(receive)

    page.route_web_socket("**/v1/realtime/chat", serve)
    page.get_by_role("button", name="Try again").click()
    expect(state(page)).to_have_text("Complete")
    assert [message["content"] for message in answers[0]["messages"]] == ["Hello!"]
    expect(page.get_by_role("button", name="Try again")).to_have_count(0)


def test_tools_schema_and_presets_are_part_of_the_request(page):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    answer_with(page, STARTED, chunk("{}", "stop"), DONE)
    page.get_by_text("Tools and JSON schema").click()
    page.get_by_label("Tools", exact=True).fill('{"name": "weather"}')
    send(page)
    expect(page.get_by_role("alert")).to_contain_text("Enter a list of tools")
    expect(page.get_by_label("Tools", exact=True)).to_be_focused()
    page.get_by_label("Tools", exact=True).fill("[{")
    expect(page.locator("#tools-error")).to_contain_text("This is not JSON")
    page.get_by_label("Tools", exact=True).fill(json.dumps(tools))
    page.get_by_label("JSON schema of the answer").fill('{"type": "object"}')
    page.get_by_label("Preset").select_option("Creative")
    page.get_by_role("tab", name="curl").click()
    body = page.get_by_role("region", name="curl").inner_text().partition("-d '")[2].rstrip("'\n")
    request = json.loads(body)
    assert request["tools"] == tools
    assert request["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (request["temperature"], request["top_p"]) == (1, 0.95)
    page.get_by_role("button", name="Send").click()
    expect(state(page)).to_have_text("Complete")


def test_a_link_and_the_history_fill_the_form(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_with(page, STARTED, chunk("Hi", "stop"), DONE)
    page.get_by_label("System prompt").fill("Répondez en français. 😀")
    page.get_by_label("Top P").fill("0.5")
    page.get_by_label("Message").fill("Hello!")
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("button", name="Link copied")).to_be_visible()
    link = str(page.evaluate("navigator.clipboard.readText()"))
    assert "fran" not in link and "#" in link
    page.get_by_role("button", name="Send").click()
    expect(state(page)).to_have_text("Complete")
    page.goto("about:blank")
    page.goto(link)
    expect(page.get_by_label("System prompt")).to_have_value("Répondez en français. 😀")
    expect(page.get_by_label("Top P")).to_have_value("0.5")
    page.goto(link.partition("#")[0])
    expect(page.get_by_label("System prompt")).to_have_value("")
    page.get_by_text("History", exact=True).click()
    page.get_by_role("button", name="Hello!").click()
    expect(page.get_by_label("System prompt")).to_have_value("Répondez en français. 😀")
    page.get_by_text("History", exact=True).click()
    page.get_by_role("button", name="Clear history").click()
    page.reload()
    expect(page.get_by_text("History", exact=True)).to_be_hidden()
    page.goto(f"{link[:-8]}!!")
    page.reload()
    expect(page.get_by_role("alert")).to_have_text("This link is not complete. Copy it again.")
