"""`millrace listen`: events of a tenant arrive at a local server, signed, also after errors of the platform."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner, Result

from millrace import cli
from millrace.cli import app, listen
from millrace.cli.profiles import config_path, read_device_id
from millrace.client import Client
from tenants.actions.webhooks import do_send_test_event
from tenants.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint
from tests.support.rows import of
from tests.support.tenants.webhook_receiver import Receiver, is_genuine, receiving

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _own_profiles(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture
def server() -> Iterator[tuple[Receiver, str]]:
    with receiving() as (receiver, port):
        yield receiver, f"http://127.0.0.1:{port}/hooks"


@pytest.fixture
def run(connect, key_connection, monkeypatch) -> Callable[..., Result]:
    """Return a function that listens until there is nothing to forward."""

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    def run(*line: str, client: Client | None = None, sleep: Callable[[float], None] = stop) -> Result:
        monkeypatch.setattr(app, "find_connection", lambda *_: key_connection)
        monkeypatch.setattr(app, "make_client", (lambda _: client) if client else connect)
        monkeypatch.setattr(listen, "sleep", sleep)
        return CliRunner().invoke(cli.root, ["listen", *line])

    return run


def test_events_are_forwarded_with_a_signature(furnished_acme, run, server):
    receiver, url = server
    first = run("--forward-to", url)
    assert (first.exit_code, receiver.received) == (0, []), first.output
    secret = first.stdout.strip()
    listener = next(row for row in of(WebhookEndpoint, furnished_acme.tenant) if row.url == url)
    do_send_test_event(listener)
    second = run("--forward-to", url)
    (got,) = receiver.received
    assert is_genuine(secret, got)
    assert second.stdout.splitlines()[0] == secret  # the same for each start
    assert f"webhook.test {got.headers['webhook-id']}: 200 in " in second.stdout
    assert [row.state for row in of(WebhookDelivery, furnished_acme.tenant, endpoint=listener)] == ["delivered"]
    run("--forward-to", url)
    assert len(receiver.received) == 1


def test_a_failed_response_is_printed_and_reported(furnished_acme, run, server):
    receiver, url = server
    receiver.status, receiver.answer = 500, b"\0no " * 1000
    run("--forward-to", url, "--events", "webhook.test, invoice.paid")
    listener = next(row for row in of(WebhookEndpoint, furnished_acme.tenant) if row.url == url)
    assert listener.event_types == ["invoice.paid", "webhook.test"]
    do_send_test_event(listener)
    started, event = map(json.loads, run("--forward-to", url, "--json").stdout.splitlines())
    assert (started["id"], started["secret"][:6]) == (listener.pk, "whsec_")
    assert (event["event"], event["status"], event["attempt"]) == ("webhook.test", 500, 1)
    (attempt,) = of(WebhookAttempt, furnished_acme.tenant, delivery__endpoint=listener)
    assert (attempt.status, len(attempt.excerpt)) == (500, 1024)
    assert "is not a valid choice" in run("--forward-to", url, "--events", "nothing").output


def test_an_unreachable_server_is_reported(furnished_acme, run):
    with receiving() as (_, port):
        url = f"http://127.0.0.1:{port}/"
    run("--forward-to", url)
    listener = next(row for row in of(WebhookEndpoint, furnished_acme.tenant) if row.url == url)
    do_send_test_event(listener)
    assert "refused" in run("--forward-to", url).stdout
    (attempt,) = of(WebhookAttempt, furnished_acme.tenant, delivery__endpoint=listener)
    assert (attempt.status, attempt.error.startswith("The connection failed: ")) == (None, True)


def test_results_survive_errors_of_the_platform(run, server):
    receiver, url = server
    headers = {"webhook-id": "evt_1"}
    polled = {"id": 5, "attempt": 1, "event_type": "webhook.test", "headers": headers, "body": "{}"}
    replies = [
        httpx2.Response(201, json={"id": 1, "url": url, "secret": "whsec_x"}),
        httpx2.Response(503, json={"code": "unavailable", "detail": "Restarting."}),
        httpx2.Response(200, json={"deliveries": [polled]}),
        httpx2.Response(500, json={"code": "error", "detail": "Broken."}),
        httpx2.Response(200, json={"deliveries": []}),
    ]
    sent: list[dict[str, Any]] = []
    pauses: list[float] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(request.content))
        return replies.pop(0)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if not replies:
            raise KeyboardInterrupt

    client = Client("http://host", "sk-mr-x", max_retries=0, transport=httpx2.MockTransport(answer))
    said = run("--forward-to", url, client=client, sleep=pause)
    assert said.exit_code == 0, said.output
    assert len(receiver.received) == 1
    result = sent[3]["results"][0]
    assert (result["id"], result["attempt"], result["status"], result["excerpt"]) == (5, 1, 200, "thanks")
    assert [body.get("results") for body in sent[1:]] == [[], [], [result], [result]]
    assert (len(pauses), "Restarting." in said.stderr) == (3, True)


def test_the_last_result_is_reported_when_the_command_is_stopped(run, server):
    receiver, url = server
    polled = {"id": 5, "attempt": 1, "event_type": "webhook.test", "headers": {"webhook-id": "evt_1"}, "body": "{}"}
    replies = [
        httpx2.Response(201, json={"id": 1, "url": url, "secret": "whsec_x"}),
        httpx2.Response(200, json={"deliveries": [polled]}),
        httpx2.Response(502, json={"code": "error", "detail": "Restarting."}),
        httpx2.Response(200, json={"deliveries": []}),
    ]
    sent: list[dict[str, Any]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(request.content))
        return replies.pop(0)

    client = Client("http://host", "sk-mr-x", max_retries=0, transport=httpx2.MockTransport(answer))
    assert run("--forward-to", url, client=client).exit_code == 0
    assert len(receiver.received) == 1
    assert (sent[-1]["max_deliveries"], [result["id"] for result in sent[-1]["results"]]) == (0, [5])


def test_a_disabled_listener_ends_the_command(furnished_acme, run, server):
    _, url = server

    def disable(seconds: float) -> None:
        from tenants.actions.webhooks import do_update_endpoint

        listener = next(row for row in of(WebhookEndpoint, furnished_acme.tenant) if row.url == url)
        do_update_endpoint(listener, active=False)

    said = run("--forward-to", url, sleep=disable)
    assert (said.exit_code, "This endpoint is disabled." in said.output) == (app.FAILED, True)


def test_the_id_of_a_machine_stays():
    assert read_device_id(config_path()) == read_device_id(config_path())


@pytest.mark.parametrize("url", ["localhost:3000", "ftp://localhost/", "http://", "http://localhost:99999/"])
def test_an_invalid_url_is_wrong_usage(run, url):
    said = run("--forward-to", url)
    assert (said.exit_code, "is not a URL" in said.output) == (app.USAGE, True)
