"""`millrace listen`: forwards a tenant's webhook events to a server on this machine, without a public address.

The command leases deliveries of its listener, posts them, and reports the results with the next poll. A delivery
without a reported result is returned again when its lease ends.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from time import monotonic, sleep, strftime
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click
import httpx2

from inference_worker.contract.command_line import format_command
from millrace.cli.app import Session, api_command
from millrace.cli.output import printable
from millrace.cli.profiles import config_path, read_device_id

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.client.models import ListenerDelivery, ListenerResult

POLL_SECONDS = 1.0
MAX_WAIT_SECONDS = 30.0  # between attempts to reach the platform
TIMEOUT_SECONDS = 10.0  # as for webhooks
MAX_RESPONSE_BYTES = 1024
MAX_REASON = 200  # characters of the error of an attempt


class ForwardedEvent(NamedTuple):
    """An event that was posted, with the response."""

    delivery: ListenerDelivery
    status: int | None
    duration_ms: int
    error: str = ""
    excerpt: str = ""

    def result(self) -> ListenerResult:
        """Return what is reported to the platform."""
        return {
            "id": self.delivery["id"],
            "attempt": self.delivery["attempt"],
            "status": self.status,
            "duration_ms": self.duration_ms,
            "error": self.error,
            "excerpt": self.excerpt,
        }

    def summary(self) -> dict[str, Any]:
        """Return what is printed as JSON."""
        fields = {"event": self.delivery["event_type"], "webhook_id": self.delivery["headers"]["webhook-id"]}
        outcome = {"status": self.status, "duration_ms": self.duration_ms, "error": self.error}
        return fields | {"attempt": self.delivery["attempt"]} | outcome


class EventForwarder:
    """Posts the events of a listener to its URL, until it is interrupted."""

    def __init__(self, client: Client, listener_id: int, url: str, show: Callable[[ForwardedEvent], None]) -> None:
        self._client = client
        self._listener_id = listener_id
        self._url = url
        self._show = show
        self._results: list[ListenerResult] = []  # not reported yet

    def run(self) -> NoReturn:
        """Forward events. Results that are not reported when it is interrupted are reported then.

        Raises:
            StatusError: the listener was disabled or deleted, or the key is not valid any more.
        """
        try:
            with httpx2.Client(timeout=TIMEOUT_SECONDS, trust_env=False) as http:
                while True:
                    deliveries = self._poll()
                    for delivery in deliveries:
                        event = post_event(http, self._url, delivery)
                        self._results.append(event.result())
                        self._show(event)
                    if not deliveries:
                        sleep(POLL_SECONDS)
        finally:
            from millrace.client.errors import MillraceError

            if self._results:
                with contextlib.suppress(MillraceError):
                    self._client.webhook_listeners.poll(self._listener_id, results=self._results, max_deliveries=0)

    def _poll(self) -> list[ListenerDelivery]:
        """Report the results and return the next deliveries, as soon as the platform answers."""
        from millrace.client.errors import ConnectionFailed, StatusError

        wait = POLL_SECONDS
        while True:
            try:
                polled = self._client.webhook_listeners.poll(self._listener_id, results=self._results)
            except (ConnectionFailed, StatusError) as exc:
                if isinstance(exc, StatusError) and exc.status != 429 and exc.status < 500:
                    raise
                click.echo(f"{printable(str(exc))} Trying again in {wait:.0f} s.", err=True)
                sleep(wait)
                wait = min(MAX_WAIT_SECONDS, wait * 2)
            else:
                self._results = []
                return polled["deliveries"]


def post_event(http: httpx2.Client, url: str, delivery: ListenerDelivery) -> ForwardedEvent:
    """Post an event. Redirects are not followed, and failures are in the result."""
    began = monotonic()
    content = b""
    try:
        with http.stream("POST", url, headers=delivery["headers"], content=delivery["body"].encode()) as response:
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) >= MAX_RESPONSE_BYTES or monotonic() - began > TIMEOUT_SECONDS:
                    break
    except httpx2.HTTPError as exc:
        reason = printable(str(exc) or type(exc).__name__)[:MAX_REASON]
        return ForwardedEvent(delivery, None, _milliseconds_since(began), reason)
    excerpt = content[:MAX_RESPONSE_BYTES].decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    return ForwardedEvent(delivery, response.status_code, _milliseconds_since(began), "", excerpt)


def _milliseconds_since(began: float) -> int:
    return round((monotonic() - began) * 1000)


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


def _print_event(event: ForwardedEvent) -> None:
    again = f", attempt {event.delivery['attempt']}" if event.delivery["attempt"] > 1 else ""
    outcome = event.error or event.status
    line = f"{event.delivery['event_type']} {event.delivery['headers']['webhook-id']}{again}: {outcome}"
    click.echo(printable(f"{strftime('%H:%M:%S')} {line} in {event.duration_ms} ms"))


def _check_url(url: str) -> None:
    """Check the URL of a server.

    Raises:
        UsageError: events cannot be posted to it.
    """
    try:
        parts = httpx2.URL(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.host) and (parts.port or 80) < 2**16
    except httpx2.InvalidURL:
        is_valid = False
    if not is_valid:
        raise click.UsageError(f"{url!r} is not a URL. Give it like http://localhost:3000/hooks.")


@click.option("--forward-to", "url", required=True, metavar="URL", help="URL of your server, such as on localhost.")
@click.option("--events", default="", metavar="TYPES", help="Only these types, separated by commas; default: all.")
def _listen(session: Session, url: str, events: str) -> None:
    """Forward webhook events to a server on this machine, until Ctrl-C.

    The platform needs no route to it: the command asks for events every second. They are signed with the printed
    secret, which stays the same for a URL and machine. A response other than 2xx is retried as for webhooks.
    """
    _check_url(url)
    types: list[Any] = [name.strip() for name in events.split(",") if name.strip()]
    client = session.client
    listener = client.webhook_listeners.create(url=url, device=read_device_id(config_path()), event_types=types)
    if session.as_json:
        _print_json({name: listener[name] for name in ("id", "url", "secret")})
    else:
        replay = format_command("webhooks deliveries")
        click.echo(f"Forwarding events to {url} until Ctrl-C; `{replay}` lists them. They are signed with:", err=True)
        click.echo(listener["secret"])
    show = (lambda event: _print_json(event.summary())) if session.as_json else _print_event
    with contextlib.suppress(KeyboardInterrupt):
        EventForwarder(client, listener["id"], url, show).run()


listen = api_command(
    "listen", _listen, example="millrace listen --forward-to http://localhost:3000/hooks --events invoice.paid"
)
